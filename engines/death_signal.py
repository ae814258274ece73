"""A child process that the kernel kills (Linux) when the thread that started it ends, however that happens."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def death_signal() -> Callable[[], None]:
    """A function for the child, before it becomes the command; what it needs is loaded here, ahead of the fork."""
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange
