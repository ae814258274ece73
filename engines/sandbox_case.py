"""One case of a sandbox, in the child that is forked for it: what is not to be trusted starts here."""

import contextlib
import io
import json
import os
import sys
import types
from typing import Any, NoReturn

from milepost.engines.plain import plain

TEXT = 500


def play(job: dict[str, Any], case: dict[str, Any], writing: int) -> NoReturn:
    """Run the code as the case says, with what it prints or comes to written to `writing`, and end this process."""
    if case["stdin"] is not None:
        _program(job["code"], case["stdin"], writing)
    try:
        said = {"value": plain(_value(job, case)), "reason": ""}
    except BaseException as error:  # whatever the code raises is what came of it
        text = " ".join(str(error).split())[:TEXT]
        said = {"value": None, "reason": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    with contextlib.suppress(OSError), os.fdopen(writing, "w") as out:
        json.dump(said, out)
    os._exit(0)


def _program(code: str, stdin: str, writing: int) -> NoReturn:
    file = os.memfd_create("stdin")
    with open(file, "wb", closefd=False) as filled:
        filled.write(stdin.encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.dup2(writing, 1)
    os.close(file)
    os.close(writing)
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), open(1, "w", encoding="utf-8", closefd=False)
    status = 0
    try:
        _load(code, "__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        status = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(status & 255)


def _value(job: dict[str, Any], case: dict[str, Any]) -> Any:
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    names = _load(job["code"], "solution", preamble=job["preamble"])
    if case["call"]:
        return _function(names, case["call"])(*case["args"])
    if case["returns"]:
        return eval(compile(case["test"], "<test>", "eval"), names)
    exec(compile(case["test"], "<test>", "exec"), names)
    return True


def _load(code: str, name: str, *, preamble: str = "") -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look themselves up
    sys.argv = [name]
    exec(compile(preamble, "<preamble>", "exec"), module.__dict__)
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def _function(names: dict[str, Any], wanted: str) -> Any:
    """The function called `wanted`, or the method of that name of the class `Solution`."""
    if wanted in names:
        return names[wanted]
    if "Solution" in names and hasattr(names["Solution"], wanted):
        return getattr(names["Solution"](), wanted)
    raise NameError(f"there is no function {wanted!r}")
