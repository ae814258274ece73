"""Ending a whole process group with the process that watches it, also children that outlive the group's leader.

The watcher is a shell that reads from a pipe which only we hold open. It is nobody's child here, because Ray ends the
children of a process that it ends.
"""

import contextlib
import subprocess

_WATCH = 'exec 3<&0; { read -r line <&3 || kill -s KILL -- "-$1"; } >/dev/null 2>&1 &'


class DeathWatch:
    """From here on the processes of `group` end with this one, however it ends; until `end`."""

    def __init__(self, group: int) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "death-watch", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._shell.wait()

    def end(self) -> None:
        """Let the group be: it has ended, and its number may be another's soon."""
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(b"\n")
            self._shell.stdin.close()
