"""The flags of an SGLang server, as the interpreter that has SGLang knows them, and the command line they make."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from milepost.storage import files
from milepost.storage.parameters import Parameters
from milepost.storage.redaction import is_secret_name
from milepost.storage.registry import nearest

Value = str | int | float | bool

LIST_SECONDS = 180.0

# What Milepost sets itself, and the parameter to use.
OWN = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "context_length": "model.context_length",
    "dtype": "perf.dtype",
    "tp_size": "engines.gpus_per_engine",
    "max_running_requests": "engines.max_running_requests",
}
_CHOSEN = ("host", "port", "weight_version", "api_key", "admin_api_key", "help", "config", "skip_tokenizer_init")

# A server without a GPU, as SGLang 0.5.21 runs on any CPU.
CPU_FLAGS: dict[str, Value] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # or it takes half a core for nothing
    "mem_fraction_static": 0.1,
    "max_total_tokens": 8192,
}

CPU_CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # which cores each rank has, for whoever splits a model over those of a CPU

# What one with a GPU takes and one without dies of, and the values that run on a CPU.
_ON_CPU = {
    "device": ("cpu",),
    "attention_backend": ("torch_native", "intel_amx"),
    "sampling_backend": ("pytorch",),
}

_VERSION = "from importlib.metadata import version; print(version('sglang'))"
_LIST = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
def flag(action):
    options = [option for option in action.option_strings if option.startswith("--")]
    return {"option": options[0], "off": options[1] if action.nargs == 0 and len(options) > 1
            and options[1].startswith("--no-") else "", "switch": action.nargs == 0,
            "several": action.nargs in ("+", "*") or isinstance(action.nargs, int) and action.nargs > 1,
            "spellings": [option[2:].replace("-", "_") for option in options],
            "number": action.type.__name__ if action.type in (int, float) else "",
            "choices": [str(choice) for choice in action.choices or ()]}
print("\\n" + json.dumps({action.dest: flag(action) for action in parser._actions}))
"""


class SglangMissing(LookupError):
    """The interpreter that is to run SGLang has none that works."""


@dataclass(frozen=True)
class Flag:
    """One flag of the server: a switch takes no value, `off` is the option that turns one off, if there is any.

    `spellings` are all names that SGLang's command line has for it, `number` is `int` or `float` where each value is
    one, `choices` are the only values where there are any.
    """

    option: str
    switch: bool
    several: bool = False
    off: str = ""
    spellings: Sequence[str] = ()
    number: str = ""
    choices: Sequence[str] = ()

    def arguments(self, value: Value) -> list[str]:
        if self.switch:
            return [self.option] if value else [self.off] if self.off else []
        return [self.option, *self.values(value)]

    def values(self, value: Value) -> list[str]:
        return str(value).split() if self.several else [str(value)]


def interpreter(python: str) -> str:
    """The interpreter of `engines.sglang_python`: this one when it is empty."""
    return os.path.expanduser(python) or sys.executable


def environment(*, gpu: bool) -> dict[str, str]:
    """What SGLang's processes see: on a CPU, stand-ins for native code that is missing there."""
    # A server whose model died waits over a minute for dumps that nobody takes: another could serve by then.
    variables = {f"SGLANG_{name}_BEFORE_CRASH": "false" for name in ("CUDA_COREDUMP", "PYSPY_DUMP")} | os.environ
    if not gpu:
        ours = str(Path(__file__).with_name("sglang_cpu"))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    return variables


@functools.cache
def known_flags(python: str) -> dict[str, Flag]:
    """Every flag by name; SglangMissing when `python` has no SGLang. Asking takes seconds, so answers are kept."""
    version = _ask(python, _VERSION).strip()
    key = hashlib.sha256(f"{os.path.realpath(python)} {python} {version} {_LIST}".encode()).hexdigest()[:16]
    home = Path(os.environ.get("MILEPOST_HOME") or Path.home() / ".milepost")
    kept = home / "sglang" / f"flags-{key}.json"
    if kept.exists():
        return {name: Flag(**flag) for name, flag in files.read_json(str(kept)).items()}
    found = {name: Flag(**flag) for name, flag in json.loads(_ask(python, _LIST).splitlines()[-1]).items()}
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.publish_json(str(kept), {name: asdict(flag) for name, flag in found.items()}, overwrite=True)
    return found


def _ask(python: str, code: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=LIST_SECONDS, env=environment(gpu=False)
        )
    except OSError as error:
        raise SglangMissing(f"engines.sglang_python {python!r} cannot be run ({error.strerror}): give one") from None
    except subprocess.TimeoutExpired:
        raise SglangMissing(f"{python} did not list SGLang's flags within {LIST_SECONDS:g} s: try again") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if "PackageNotFoundError" in lines[-1]:
            raise SglangMissing(
                f"sglang is not installed for {python}: pip install 'milepost[sglang]', or set engines.sglang_python "
                "to an interpreter that has it"
            )
        raise SglangMissing(f"sglang of {python} does not work: {lines[-1]}")
    return done.stdout


def check_flags(chosen: Mapping[str, Value], known: Mapping[str, Flag]) -> None:
    """LookupError for a name that the server does not know, ValueError for a value that a flag cannot have."""
    for name, value in chosen.items():
        if name in OWN:
            raise ValueError(f"engines.sglang.{name} is set from {OWN[name]}: use that")
        if name in _CHOSEN:
            raise ValueError(f"engines.sglang.{name} is Milepost's to choose: leave it out")
        if is_secret_name(name):
            raise ValueError(f"engines.sglang.{name} would be in the list of processes, where all see it: leave it out")
        if name not in known:
            meant = next((own for own, flag in known.items() if name in flag.spellings), name)
            raise LookupError(f"SGLang has no flag {name!r}{nearest(meant, sorted(known))}")
        if known[name].switch is not isinstance(value, bool):
            wanted = "true or false" if known[name].switch else "a value"
            raise ValueError(f"engines.sglang.{name} is {value!r}, expected {wanted}")
        _check_values(name, value, known[name])


def _check_values(name: str, value: Value, flag: Flag) -> None:
    """What the server would say itself, after it was waited for."""
    if flag.switch:
        return
    for one in flag.values(value):
        if flag.number and not _is_number(one, flag.number):
            wanted = "a whole number" if flag.number == "int" else "a number"
            raise ValueError(f"engines.sglang.{name} is {value!r}, expected {wanted}")
        if flag.choices and one not in flag.choices:
            known = ", ".join(flag.choices)
            raise LookupError(f"engines.sglang.{name} is {value!r}{nearest(one, list(flag.choices))}; known: {known}")


def _is_number(text: str, kind: str) -> bool:
    try:
        (int if kind == "int" else float)(text)
    except ValueError:
        return False
    return True


def check_sglang(parameters: Parameters) -> None:
    """Check `engines.sglang*` before anything is started: LookupError for names, ValueError for values."""
    engines = parameters.engines
    if engines.sglang_urls:
        if len(engines.sglang_urls) != engines.rollout_engines:
            raise ValueError(
                f"engines.sglang_urls has {len(engines.sglang_urls)} servers for {engines.rollout_engines} engines: "
                "set engines.rollout_engines to as many"
            )
        if engines.sglang:
            raise ValueError(
                f"engines.sglang {sorted(engines.sglang)} cannot change servers that run already: leave it out"
            )
    else:
        check_flags(engines.sglang, known_flags(interpreter(engines.sglang_python)))


def server_flags(parameters: Parameters, index: int, *, gpu: bool) -> dict[str, Value]:
    """What the parameters ask of server `index` and `engines.sglang` may change, and the latter."""
    if not gpu and not parameters.engines.sglang_urls:
        _check_cpu(parameters)
    flags: dict[str, Value] = {"random_seed": parameters.data.seed + index}
    if parameters.perf.colocate and gpu:  # without one there is no memory to give up
        flags |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    if parameters.sync.pause_mode == "in_place":
        flags["disable_radix_cache"] = True  # what older weights cached would be used by new requests
    return flags | parameters.engines.sglang


def _check_cpu(parameters: Parameters) -> None:
    """ValueError for what a server cannot do where Ray knows of no GPU."""
    engines = parameters.engines
    if engines.gpus_per_engine > 1 and CPU_CORES not in os.environ:
        raise ValueError(
            f"engines.gpus_per_engine is {engines.gpus_per_engine} and there is no GPU here: set it to 1, or start the "
            "run where Ray has GPUs"
        )
    for name, able in _ON_CPU.items():
        value = engines.sglang.get(name)
        if value is not None and value not in able:
            raise ValueError(
                f"engines.sglang.{name} is {value!r} and there is no GPU here: leave it out, or start the run where "
                "Ray has GPUs"
            )


def command_line(flags: Mapping[str, Value], known: Mapping[str, Flag]) -> list[str]:
    """Arguments of `sglang.launch_server`."""
    return [argument for name, value in flags.items() for argument in known[name].arguments(value)]
