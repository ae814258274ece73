"""What keeps a case inside where the kernel offers no sandbox: refusals that Python code cannot take back.

Code in other languages gets around them, so they are the second choice: `milepost doctor` says which holds.
"""

import os
import sys
from typing import Any

_REFUSED = ("socket.", "ctypes.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "pty.")
_PATHS = (
    "os.chmod os.chown os.link os.mkdir os.remove os.rename os.rmdir os.symlink os.truncate os.utime os.listdir "
    "os.scandir os.chdir shutil.rmtree shutil.move shutil.copyfile shutil.copytree"
).split()
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def keep_inside(folder: str) -> None:
    """Refuse this process, for good, whatever is outside of `folder`: writing, other processes, /proc, the network."""
    inside = os.path.realpath(folder)
    readable = [os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix, "/usr/lib") if path]

    def within(path: Any, places: list[str]) -> bool:
        if isinstance(path, int):
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == place or real.startswith(f"{place}/") for place in places)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if path is not None and not within(path, [inside] if flags & _WRITING else [inside, *readable]):
                raise PermissionError(f"not in this sandbox: {path!r}")
        elif event in _PATHS:
            named = [path for path in args[:2] if isinstance(path, str | bytes | os.PathLike)]
            if not all(within(path, [inside, *readable]) for path in named) or (
                event not in ("os.listdir", "os.scandir") and not all(within(path, [inside]) for path in named)
            ):
                raise PermissionError(f"not in this sandbox: {event} of {named}")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"not in this sandbox: {event}")

    sys.addaudithook(hook)
