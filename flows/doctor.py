"""What a run needs of this machine, one by one. A check never raises: it says what it found and what to do."""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.markup import escape
from rich.table import Table

from milepost.engines import memory_plan, torch_build
from milepost.engines.model_source import check_folder, module_of
from milepost.flows import launches, service_state
from milepost.flows.check import GIB, Check, checked, in_gib
from milepost.flows.doctor_graders import graders
from milepost.storage import files

MIN_DISK_BYTES = 2 * GIB
MIN_MEMORY_BYTES = 2 * GIB
MIN_SHARED_MEMORY_BYTES = 64 * 1024**2
PACKAGES = ("prefect", "ray", "mlflow", "pyarrow", "transformers", "megatron-core")


def diagnose(root: str, model_path: str | None = None) -> list[Check]:
    """Every check, for runs under `root` and the model at `model_path`."""
    checks = [python(), gpu(), torch(), *packages(), sglang(), disk(root), shared_memory(), memory(), threads()]
    checks += [graders()]
    checks += [port("Prefect", launches.PREFECT_PORT, "prefect"), port("MLflow", launches.MLFLOW_PORT, "mlflow")]
    checks += [ray_token(), state(), host_name()]
    return [*checks, model(model_path)] if model_path else checks


def render(checks: list[Check]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "check", "found", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        texts = (escape(text) for text in (check.name, check.found, check.fix))  # an extra is in brackets, as markup is
        table.add_row("[green]ok[/]" if check.ok else "[red]no[/]", *texts)
    return table


def python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return checked("Python", (3, 11) <= sys.version_info[:2] <= (3, 12), found, "use Python 3.11 or 3.12")


def torch() -> Check:
    """Whether torch loads, and can use the GPUs that are here."""
    try:
        build = torch_build.probe()
    except torch_build.TorchBroken as error:
        fix = "install the package again in this environment: pip install --force-reinstall torch"
        return Check("torch", False, str(error), fix)
    if gpu().ok and memory_plan.gpu_bytes() is not None and (wrong := torch_build.mismatch(build)):
        return Check("torch", False, *wrong)
    devices = build.devices
    where = f"CUDA, {len(devices)} x {devices[0]}" if devices else f"CPU, {os.cpu_count()} cores"
    return Check("torch", True, f"{build.version} on {where}")


def gpu() -> Check:
    """A driver that does not answer looks to Ray like a machine without GPUs."""
    try:
        size = memory_plan.gpu_bytes()
    except memory_plan.DriverSilent as error:
        return Check("GPU", False, str(error), "load the driver that is installed: restart the machine or container")
    return Check("GPU", True, "none, everything runs on the CPU" if size is None else f"{in_gib(size)} of memory each")


def sglang() -> Check:
    """It may also be in an environment of its own, which `engines.sglang_python` names."""
    try:
        return Check("sglang", True, version("sglang"))
    except PackageNotFoundError:
        hint = "for engines.rollout=sglang: pip install 'milepost[sglang]', or set engines.sglang_python"
        return Check("sglang", True, f"not installed; {hint}")


def packages() -> Iterator[Check]:
    for name in PACKAGES:
        try:
            yield Check(name, True, version(name))
        except PackageNotFoundError:
            yield Check(name, False, "not installed", f"install it: pip install {name}")


def disk(root: str) -> Check:
    """Free space where runs go; only a local root has a size."""
    try:
        if not files.is_local(root):
            return _reachable(root)
        folder = Path(files.filesystem(root)[1]).absolute()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            return Check("disk", False, f"{existing} is not a folder one can write to", "choose another --root")
        free = shutil.disk_usage(existing).free
    except (OSError, ValueError, ImportError) as error:
        return Check("disk", False, f"{root} cannot be read: {error}", "choose a root that exists, or a local folder")
    fix = f"free at least {in_gib(MIN_DISK_BYTES)}, or choose a root on another disk"
    return checked("disk", free >= MIN_DISK_BYTES, f"{in_gib(free)} free at {existing}", fix)


def _reachable(root: str) -> Check:
    try:
        fs, path = files.filesystem(root)
        fs.exists(path)
    except Exception as error:  # every storage library has errors of its own
        return Check("disk", False, f"{root} does not answer: {error}", "check its address and your credentials")
    return Check("disk", True, f"{root} answers")


def shared_memory() -> Check:
    """Ray keeps objects in /dev/shm; containers often give it 64 MB."""
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Check("shared memory", sys.platform != "linux", f"no {path}", f"mount a tmpfs at {path}")
    free = shutil.disk_usage(path).free
    fix = "start the container with --shm-size=1g"
    return checked("shared memory", free >= MIN_SHARED_MEMORY_BYTES, f"{in_gib(free)} free at {path}", fix)


def memory() -> Check:
    """Free memory of the machine, or of the container when that has less."""
    available = psutil.virtual_memory().available
    limit = _container_limit()
    found = min(available, limit) if limit else available
    fix = "end other programs, or choose a smaller model and perf.max_tokens_per_micro_batch"
    return checked("memory", found >= MIN_MEMORY_BYTES, f"{in_gib(found)} available", fix)


def _container_limit() -> int | None:
    """Bytes the container may use in total; None when it is not limited."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def threads() -> Check:
    """OMP_NUM_THREADS decides the threads of every process; more than the cores slows all of them down."""
    value, cores = os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1
    if value is None:
        return Check("threads", True, f"OMP_NUM_THREADS is not set, torch chooses among {cores} cores")
    ok = value.isdigit() and 1 <= int(value) <= cores
    return checked("threads", ok, f"OMP_NUM_THREADS={value}", f"set it to 1 to {cores}, or unset it")


def port(title: str, number: int, service: str) -> Check:
    """Who has the usual port of a service. It is never in the way: the service takes another when this one is taken."""
    name = f"port {number}"
    try:
        own = service_state.load().get(service)
    except ValueError as error:
        return Check(name, False, str(error), "remove the file once its processes have ended")
    if own and service_state.is_alive(own):
        return Check(name, True, f"{title} runs at {own.url.removesuffix('/api')}")
    if service_state.port_is_free(number):
        return Check(name, True, f"free for {title}")
    return Check(name, True, f"another program has it, so {title} will take another")


def ray_token() -> Check:
    """The token is the lock of a Ray that listens on every address."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        return Check("Ray token", False, f"RAY_AUTH_MODE={mode}", "unset RAY_AUTH_MODE: Ray listens on every address")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check("Ray token", True, "RAY_AUTH_TOKEN is set")
    path = launches.ray_token_file()
    try:
        if not path.exists():
            return Check("Ray token", True, f"{path} will be made by the first start")
        empty = not path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        return Check("Ray token", False, f"{path} cannot be read: {error}", "remove it, a new one is made")
    return checked("Ray token", not empty, f"{path} is {'empty' if empty else 'there'}", "remove it, a new one is made")


def state() -> Check:
    """Whether the folder that remembers services can be used."""
    try:
        folder = service_state.state_folder()
    except OSError as error:
        return Check("state folder", False, str(error), "set MILEPOST_HOME to a folder that can be written to")
    ok = os.access(folder, os.W_OK)
    return checked("state folder", ok, str(folder), "set MILEPOST_HOME to a folder that can be written to")


def model(path: str) -> Check:
    """Whether the model is there: a folder with a config, a GGUF file, or a package that ships one."""
    if path.startswith("package:"):
        name = path.removeprefix("package:")
        return _package_model(name)
    place = Path(path).expanduser()
    if place.is_dir():
        try:
            return Check("model", True, f"folder {check_folder(place)}")
        except ValueError as error:
            return Check("model", False, str(error), "give a folder as `save_pretrained` writes it")
    if place.is_file():
        return checked(
            "model", place.suffix == ".gguf", f"file {place}", "give a model folder, or a file in GGUF format"
        )
    return Check(
        "model", False, f"{path} does not exist", "give a folder on this machine, a .gguf file, or package:NAME"
    )


def _package_model(name: str) -> Check:
    """`name` has a file inside the package after a slash."""
    module = module_of(name.partition("/")[0])
    if not module.isidentifier():
        return Check("model", False, f"{module!r} is no package's name", "write package:NAME")
    fix = f"install it: pip install --no-deps {module.replace('_', '-')}"
    return checked("model", importlib.util.find_spec(module) is not None, f"package {module}", fix)


def host_name() -> Check:
    """Gloo and Ray resolve the machine's own name."""
    name = socket.gethostname()
    try:
        return Check("host name", True, f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return Check("host name", False, f"{name}: {error}", f"add `127.0.0.1 {name}` to /etc/hosts")
