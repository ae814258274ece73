"""Where actors log: in a folder that whoever starts them has chosen, a file each."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_folder: ContextVar[str] = ContextVar("logs", default="")


@contextmanager
def logs_in(folder: str) -> Iterator[None]:
    """Actors that are started inside write what they log into a file each in `folder`."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def log_path(name: str) -> str:
    """The file of the actor called `name`, `run/rank` or so; empty when none was chosen."""
    return str(Path(_folder.get(), f"{name.rpartition('/')[2]}.log")) if _folder.get() else ""
