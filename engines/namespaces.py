"""What the Linux kernel keeps away from a process: the network, other processes, the files of the machine.

All of this is for a process of one thread that is about to run somebody else's code. What a kernel forbids is answered
with False, and then audit hooks refuse the same to Python code, which code in other languages gets around.
"""

import ctypes
import os
import socket
import sys
from typing import Any

_MOUNTS, _UTS, _IPC, _USER, _PIDS, _NET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_SUBREAPER, _DEATH_SIGNAL, _DUMPABLE, _NO_NEW_PRIVILEGES = 36, 1, 4, 38
_CAPABILITY_VERSION = 0x20080522
SANDBOX_ID = 65534  # nobody, as the user of a sandbox sees itself
FREE_IDS = 1_000_000_000  # where nobody has user ids

libc = ctypes.CDLL(None, use_errno=True)


def leave_network() -> bool:
    """Give up every network interface for good, loopback too."""
    return _unshare(_NET) or _unshare_as_user(_NET, inside=os.geteuid())


def leave_machine() -> bool:
    """Give up network, processes, mounts and host name. The next fork begins the new processes, as number 1 of them."""
    apart = _MOUNTS | _PIDS | _NET | _IPC | _UTS
    return (has_free_ids() and _unshare(apart)) or _unshare_as_user(apart, inside=SANDBOX_ID)


def has_free_ids() -> bool:
    """Whether this process may become a user that nobody is, and so one whose processes are counted alone."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as ranges:
        first, _, count = ranges.readline().split()
    return int(first) == 0 and int(count) > FREE_IDS + 2**22


def drop_privileges(free_id: int | None) -> None:
    """Become `free_id`, or stay the same user, with no capability; nothing that is run gives any back."""
    if free_id is not None:
        os.setgroups([])
        os.setresgid(free_id, free_id, free_id)
        os.setresuid(free_id, free_id, free_id)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    require(libc.capset(header, none), "capset")
    require(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    # Processes of the same user could otherwise open what this one has open, or read its memory.
    require(libc.prctl(_DUMPABLE, 0, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Be the parent of every descendant whose own parent ends."""
    require(libc.prctl(_SUBREAPER, 1, 0, 0, 0), "prctl")


def end_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the thread that forked this process ends."""
    require(libc.prctl(_DEATH_SIGNAL, signal_number, 0, 0, 0), "prctl")


def refuse_sockets() -> None:
    """Have every network socket of Python code in this process refused from now on, for good."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        inet = event == "socket.__new__" and args[1] in (socket.AF_INET, socket.AF_INET6)
        if inet or event in ("socket.getaddrinfo", "socket.gethostbyname"):
            raise PermissionError("rewards have no network here: set reward.network for one that needs it")

    sys.addaudithook(hook)


def _unshare(flags: int) -> bool:
    return bool(libc.unshare(flags) == 0)


def _unshare_as_user(flags: int, *, inside: int) -> bool:
    """As a user who may not do it: with a user namespace, in which this user is called `inside`."""
    uid, gid = os.geteuid(), os.getegid()
    if not _unshare(_USER | flags):
        return False
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{inside} {uid} 1")
        _write("/proc/self/gid_map", f"{inside if inside == SANDBOX_ID else gid} {gid} 1")
    except OSError:  # some distributions allow the namespace and nothing in it
        return False
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def require(result: int, call: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
