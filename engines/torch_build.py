"""What torch finds on this machine, and whether it can use the GPUs that are here."""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass

CUDA_INDEX = "https://download.pytorch.org/whl/cu130"

_PROBE_SECONDS = 120
_PROBE = """
import json, torch
names, problem = [], ""
try:
    torch.cuda.init()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
except Exception as error:
    problem = str(error)
found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "devices": names, "problem": problem}
print(json.dumps(found))
"""


class TorchBroken(RuntimeError):
    """Torch cannot be imported."""


@dataclass(frozen=True)
class TorchBuild:
    """`cuda` is the version it is built for, empty for a CPU build; `problem` is torch's own word on missing GPUs."""

    version: str
    cuda: str
    devices: list[str]
    problem: str


@functools.cache
def probe() -> TorchBuild:
    """Import torch in another process: it is slow to load, and a broken driver can end the process that asks."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TorchBroken(f"cannot be tried: {error}") from None
    if done.returncode:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise TorchBroken(f"import ends with code {done.returncode}: {said}")
    return TorchBuild(**json.loads(done.stdout.splitlines()[-1]))


def mismatch(build: TorchBuild) -> tuple[str, str] | None:
    """Why torch cannot use GPUs that are here, and what to do about it; None when it can."""
    if build.devices:
        return None
    if not build.cuda:
        fix = f"install a CUDA build: pip install --force-reinstall torch --index-url {CUDA_INDEX}"
        return f"torch {build.version} is built without CUDA and this machine has GPUs", fix
    said = " ".join(build.problem.split()).partition(". ")[0].rstrip(".") or "it finds none"
    fix = f"update the NVIDIA driver, or install a torch built for a CUDA before {build.cuda}"
    return f"torch {build.version}, built for CUDA {build.cuda}, cannot use this machine's GPUs ({said})", fix


def require_cuda() -> None:
    """ValueError unless torch can use the GPUs of this machine, which has some."""
    try:
        found = mismatch(probe())
    except TorchBroken as error:
        raise ValueError(f"torch {error}: install it again, pip install --force-reinstall torch") from None
    if found:
        raise ValueError(": ".join(found))
