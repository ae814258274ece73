"""Rewards: a function from a Sample to a score, run in a process of its own so that it can hang, crash or eat memory.

Every response gets a Verdict. A score is a finite number; anything else is None with the reason, never NaN.
"""

import atexit
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from milepost.engines.grader_process import START_SECONDS, Answer, Call, GraderProcess
from milepost.storage.registry import load_dotted, nearest, resolve
from milepost.tasks.boxed import boxed
from milepost.tasks.reward_choice import single, unboxed
from milepost.tasks.verdict import Verdict

GROUP = "milepost.rewards"
TIMEOUT_SECONDS = 10.0
# Of the module that needs this one.
CHECK = "milepost.tasks.scoring:check"
SCORE = "milepost.tasks.scoring:score"

Reward = Callable[..., Any]

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# By name, so that knowing them imports none of their libraries.
REWARDS = {
    "math": "milepost.tasks.math_reward:math",
    "deepscaler": "milepost.tasks.math_reward:deepscaler",
    "dapo": "milepost.tasks.math_reward:dapo",
    "gsm8k": "milepost.tasks.gsm8k_reward:gsm8k",
    "multiple_choice": "milepost.tasks.choice_reward:multiple_choice",
    "gpqa": "milepost.tasks.choice_reward:multiple_choice",
    "f1": "milepost.tasks.squad_rewards:f1",
    "exact_match": "milepost.tasks.squad_rewards:exact_match",
    "exact": "milepost.tasks.text_rewards:exact",
    "regex": "milepost.tasks.text_rewards:regex",
    "json_schema": "milepost.tasks.json_schema_reward:json_schema",
    "format": "milepost.tasks.format_reward:format",
    "length_penalty": "milepost.tasks.length_reward:length_penalty",
    "random": "milepost.tasks.random_rewards:random",
    "deterministic_random": "milepost.tasks.random_rewards:deterministic_random",
    "reasoning_gym": "milepost.tasks.reasoning_gym_reward:reasoning_gym",
    "code": "milepost.tasks.code_reward:code",
    "remote": "milepost.tasks.remote_reward:remote",
    "judge": "milepost.tasks.judge_reward:judge",
}
# Further files whose code decides a verdict.
_EXTRACTION = "milepost.tasks.extraction"
_ANSWERS = (_EXTRACTION, "milepost.tasks.math_answers", "milepost.tasks.numerals")
_SANDBOX = tuple(f"milepost.engines.{name}" for name in ("sandbox", "sandbox_program", "sandbox_case", "plain"))
_PARTS: dict[str, tuple[str, ...]] = {
    "milepost.tasks.math_reward": (*_ANSWERS, "milepost.tasks.math_bounds", "milepost.tasks.math_equality"),
    "milepost.tasks.gsm8k_reward": _ANSWERS,
    "milepost.tasks.choice_reward": (_EXTRACTION,),
    "milepost.tasks.squad_rewards": (_EXTRACTION,),
    "milepost.tasks.json_schema_reward": (_EXTRACTION, "milepost.storage.strict_json"),
    "milepost.tasks.reasoning_gym_reward": (_EXTRACTION,),
    "milepost.tasks.code_reward": (_EXTRACTION, "milepost.tasks.code_tests", *_SANDBOX),
    "milepost.tasks.remote_reward": ("milepost.tasks.asked_over_http",),
    "milepost.tasks.judge_reward": (_EXTRACTION, "milepost.tasks.asked_over_http"),
}


def reward_function(name: str) -> str:
    """Where the code of the reward `name` is, as `pkg.mod:fn`. Imports nothing; LookupError for an unknown name."""
    name = unboxed(name)
    if name not in REWARDS and ":" not in name:
        installed = {point.name: point.value for point in entry_points(group=GROUP)}
        return str(resolve(name, {**REWARDS, **installed}, group=GROUP))
    return REWARDS.get(name, name)


def get_reward(name: str) -> Reward:
    """The reward called `name`: `(sample, **options) -> float | bool | Verdict | None`, which may be async.

    One whose first parameter is called `samples` takes a list of them, and returns a list.
    """
    reward: Reward = load_dotted(reward_function(name), group=GROUP)
    return boxed(reward) if unboxed(name) != name else reward


def label_problem(name: str, label: Any, options: Mapping[str, Any]) -> str:
    """Why the reward called `name` cannot grade this label, in a sentence with the fix; empty when it can.

    A reward `pkg.mod:fn` says so in `fn_label_problem(label, options)` beside it; one without takes any label. To be
    called in a grader: it is the reward's code that reads the label.
    """
    problem = _label_rule(name)
    return str(problem(label, options)) if problem else ""


def checks_labels(name: str) -> bool:
    """Whether there are labels that the reward called `name`, whose module is imported, says it cannot grade."""
    return _label_rule(name) is not None


def _label_rule(name: str) -> Callable[[Any, Mapping[str, Any]], str] | None:
    module, _, function = reward_function(name).partition(":")
    rule: Callable[[Any, Mapping[str, Any]], str] | None
    rule = getattr(importlib.import_module(module), f"{function}_label_problem", None)
    return rule


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Raise unless the reward exists and takes a sample and these options; LookupError or ValueError with the fix."""
    reward = get_reward(name)
    if not callable(reward):
        raise ValueError(f"reward {name!r} is {reward!r}, it must be a function of a sample")
    signature = inspect.signature(reward)
    takes = [key for key, parameter in signature.parameters.items() if parameter.kind in _BY_NAME][1:]
    try:
        signature.bind(None, **options)
    except TypeError as error:
        for option in sorted(set(options) - set(takes)):
            hint = nearest(option, takes)
            raise ValueError(f"reward {name!r} has no option {option!r}{hint or ':'} it takes {signature}") from None
        required = [key for key in takes if signature.parameters[key].default is inspect.Parameter.empty]
        missing = [key for key in required if key not in options]
        if missing:
            raise ValueError(f"reward {name!r} lacks a value for {missing}: give it in the reward's options") from None
        raise ValueError(f"reward {name!r} takes {signature}, not a sample and {dict(options)}") from error


@functools.cache
def grader_id(name: str) -> str:
    """`name@hash`: eight digits of the SHA-256 of the file that defines the reward, so that a changed one differs."""
    module = reward_function(name).partition(":")[0]
    box = (_EXTRACTION, "milepost.tasks.boxed") if unboxed(name) != name else ()
    sources = b"".join(_source(name, part) for part in (module, *_PARTS.get(module, ()), *box))
    return f"{name}@{hashlib.sha256(sources).hexdigest()[:8]}"


def _source(name: str, module: str) -> bytes:
    """The source of a module without importing it; its name when it has none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise LookupError(f"reward {name!r}: cannot import {module!r} ({error})") from error
    if spec is None:
        raise LookupError(f"reward {name!r}: cannot import {module!r}: no such module")
    path = Path(spec.origin or "")
    return path.read_bytes() if path.is_file() else module.encode()


def grade(reward: str, response: str, label: Any, **options: Any) -> Verdict:
    """The verdict of the reward called `reward` on one response, from a process that this one keeps for it.

    `prompt`, `metadata`, `timeout_seconds` and `network` are taken for the sample, its deadline and the process; every
    other option goes to the reward. LookupError for an unknown reward, ValueError for options it does not take.
    """
    grader = grader_id(reward)
    timeout_seconds = float(options.pop("timeout_seconds", TIMEOUT_SECONDS))
    row = {"prompt": options.pop("prompt", ""), "response": response, "label": label}
    row["metadata"] = options.pop("metadata", None)
    choice = single(reward, options, network=bool(options.pop("network", False)))
    worker, check = _own_grader(os.getpid(), choice.network), Call(CHECK, (choice.as_json(),))
    require_loaded(reward, worker.ask(check, timeout_seconds=START_SECONDS))
    answer = worker.ask(Call(SCORE, (choice.as_json(), [row])), timeout_seconds=timeout_seconds, warm_up=check)
    return verdicts_from(answer, grader, 1)[0]


def require_loaded(name: str, checked: Answer) -> None:
    """LookupError or ValueError, in the words of the check, unless a grader could load the reward called `name`."""
    if checked.reason is not None:
        kind, _, text = checked.reason.removeprefix("error: ").partition(": ")
        raise (LookupError if kind == "LookupError" else ValueError)(text or f"reward {name!r} did not load: {kind}")


@functools.cache
def _own_grader(process_id: int, network: bool) -> GraderProcess:
    """This process's grader; by process id, because a fork must not talk on its parent's socket."""
    grader = GraderProcess(network=network)
    atexit.register(grader.close)
    return grader


def verdicts_from(answer: Answer, grader: str, count: int) -> list[Verdict]:
    """The verdicts on `count` samples that a grader was asked for together, also where it gave none."""
    if answer.reason is not None:
        return [Verdict(None, reason=answer.reason, grader=grader, seconds=answer.seconds / count)] * count
    return [Verdict(**said) for said in answer.value]
