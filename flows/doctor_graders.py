"""How far the kernel of this machine keeps rewards, and the code that they run, from everything else."""

import subprocess

from milepost.engines import isolation
from milepost.flows.check import Check


def graders() -> Check:
    """Both ways work, so neither is in the way of a run; the second stops Python code only."""
    try:
        found = isolation.probe()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Check("graders", False, f"they cannot be tried: {error}", "run on Linux")
    network = "no network, by namespace" if found.network else "sockets of Python refused, no namespace is allowed"
    code = "code in a sandbox of the kernel" if found.sandbox else "code kept in by audit hooks only"
    hint = "" if found.network and found.sandbox else "; set the sysctl user.max_user_namespaces above 0 for more"
    return Check("graders", True, f"{network}; {code}{hint}")
