"""The files of a sandbox: Python and its libraries, read only, and one small folder to write to, in memory."""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from milepost.engines.namespaces import libc, require

WORK = "/tmp"
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE = 442, -100, 0x8000


def enter(folder: str, *, size: int) -> None:
    """Make `folder`, an empty one, the root of this process, with `size` bytes to write; OSError where forbidden.

    The process is number 1 of its own processes and mounts. Of /proc it sees what is its own, or nothing where the
    kernel hides even that.
    """
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={size},nr_inodes=4096,mode=755")
    for path in (*SYSTEM, *_pythons()):
        _show(folder, path)
    for path in DEVICES:
        _show(folder, path, devices=True)
    for path, mode in (("/proc", 0o555), (WORK, 0o1777)):
        os.makedirs(folder + path, exist_ok=True)
        os.chmod(folder + path, mode)
    try:
        _mount("proc", f"{folder}/proc", "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
    except OSError:  # a container hides parts of its own: then there is none at all
        pass
    os.chdir(folder)
    require(libc.pivot_root(b".", b"."), "pivot_root")
    require(libc.umount2(b".", _DETACH), "umount2")
    os.chdir(WORK)


def _pythons() -> Iterable[str]:
    """This interpreter's folders, and that of the program behind its links."""
    program = Path(os.path.realpath(sys.executable)).parent.parent
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(program)} - {"/", "/usr"}
    return sorted(folders)


def _show(folder: str, path: str, *, devices: bool = False) -> None:
    """Show what is at `path` at the same place under `folder`, read only."""
    place = folder + path
    if os.path.lexists(place) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        Path(place).touch()
    _mount(path, place, None, _BIND | _RECURSIVE)
    flags = _READ_ONLY | _NO_SUID | (0 if devices else _NO_DEVICES)
    attributes = (ctypes.c_uint64 * 4)(0 if devices else flags, 0, 0, 0)  # set, clear, propagation, user namespace
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc.syscall(_MOUNT_SETATTR, _HERE, place.encode(), _AT_RECURSIVE, attributes, size)
    require(result, f"mount_setattr {path}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, options.encode() or None)
    require(result, f"mount {target}")
