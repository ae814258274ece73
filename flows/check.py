"""One thing that a run needs of this machine, and what is to be done about it."""

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One thing a run needs. `fix` is what to do when it is not `ok`, and empty otherwise."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def checked(name: str, ok: bool, found: str, fix: str) -> Check:
    return Check(name, ok, found, "" if ok else fix)


def in_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
