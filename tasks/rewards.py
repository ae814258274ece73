"""Rewards: a function from a Sample to a score, run in a process of its own so that it can hang, crash or eat memory.

Every response gets a Verdict. A score is a finite number; anything else is None with the reason, never NaN.
"""

import asyncio
import atexit
import functools
import hashlib
import importlib.util
import inspect
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from milepost.engines.grader_process import START_SECONDS, Answer, Call, GraderProcess
from milepost.storage.registry import load_dotted, nearest, resolve
from milepost.tasks.verdict import Sample, Verdict

GROUP = "milepost.rewards"
TIMEOUT_SECONDS = 10.0
GRADE_ROW = "milepost.tasks.rewards:grade_row"

Reward = Callable[..., Any]

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# By name, so that knowing them imports none of their libraries.
REWARDS = {
    "math": "milepost.tasks.math_reward:math",
    "exact": "milepost.tasks.text_rewards:exact",
    "regex": "milepost.tasks.text_rewards:regex",
    "reasoning_gym": "milepost.tasks.reasoning_gym_reward:reasoning_gym",
}
# Further files whose code decides a verdict.
_PARTS = {"milepost.tasks.math_reward": ("milepost.tasks.math_answers",)}


class Graders(Protocol):
    """Where rewards run: answers in the order of the calls, each within its own deadline."""

    async def map(
        self, function: str, items: Sequence[Sequence[Any]], *, timeout_seconds: float, warm_up: Call | None = None
    ) -> list[Answer]: ...


def reward_function(name: str) -> str:
    """Where the code of the reward `name` is, as `pkg.mod:fn`. Imports nothing; LookupError for an unknown name."""
    if name not in REWARDS and ":" not in name:
        installed = {point.name: point.value for point in entry_points(group=GROUP)}
        return str(resolve(name, {**REWARDS, **installed}, group=GROUP))
    return REWARDS.get(name, name)


def get_reward(name: str) -> Reward:
    """The reward called `name`: `(sample, **options) -> float | bool | Verdict | None`, which may be async."""
    reward: Reward = load_dotted(reward_function(name), group=GROUP)
    return reward


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
            raise ValueError(f"reward {name!r} has no option {option!r}{hint} it takes {signature}") from None
        raise ValueError(f"reward {name!r} takes {signature}, not a sample and {dict(options)}") from error


@functools.cache
def grader_id(name: str) -> str:
    """`name@hash`: eight digits of the SHA-256 of the file that defines the reward, so that a changed one differs."""
    module = reward_function(name).partition(":")[0]
    sources = b"".join(_source(name, part) for part in (module, *_PARTS.get(module, ())))
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


def grade_row(name: str, row: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one sample as JSON, in the process it is called in; an error of the reward is raised.

    `row` has the sample's `response`, and `prompt`, `label` and `metadata` as values, not as JSON text.
    """
    started = time.monotonic()
    sample = Sample(row.get("prompt"), row["response"], row.get("label"), row.get("metadata") or {})
    said = get_reward(name)(sample, **options)
    if inspect.isawaitable(said):
        said = asyncio.run(_awaited(said))
    verdict = replace(_verdict(name, said), grader=grader_id(name), seconds=time.monotonic() - started)
    return asdict(verdict)


async def grade_rows(
    graders: Graders,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    timeout_seconds: float,
) -> list[Verdict]:
    """A verdict per row, in order, from a pool of graders. A row that hangs or kills its grader costs only itself."""
    items = [(name, row, options) for row in rows]
    answers = await graders.map(GRADE_ROW, items, timeout_seconds=timeout_seconds, warm_up=warm_up(name, options))
    grader = grader_id(name)
    return [_from_answer(answer, grader) for answer in answers]


def grade(reward: str, response: str, label: Any, **options: Any) -> Verdict:
    """The verdict of the reward called `reward` on one response, from a process that this one keeps for it.

    `prompt`, `metadata` and `timeout_seconds` are taken for the sample and its deadline; every other option goes to the
    reward. LookupError for an unknown reward, ValueError for options it does not take.
    """
    grader = grader_id(reward)
    timeout_seconds = float(options.pop("timeout_seconds", TIMEOUT_SECONDS))
    row = {"prompt": options.pop("prompt", ""), "response": response, "label": label}
    row["metadata"] = options.pop("metadata", None)
    worker, check = _own_grader(os.getpid()), warm_up(reward, options)
    _require_loaded(reward, worker.ask(check, timeout_seconds=START_SECONDS))
    answer = worker.ask(Call(GRADE_ROW, (reward, row, options)), timeout_seconds=timeout_seconds, warm_up=check)
    return _from_answer(answer, grader)


async def require_reward(graders: Graders, name: str, options: Mapping[str, Any]) -> None:
    """LookupError or ValueError, in the words of `grade`, unless a grader can load the reward and takes its options."""
    reward_function(name)
    check = warm_up(name, options)
    (answer,) = await graders.map(check.function, [check.args], timeout_seconds=START_SECONDS)
    _require_loaded(name, answer)


def _require_loaded(name: str, checked: Answer) -> None:
    if checked.reason is not None:
        kind, _, text = checked.reason.removeprefix("error: ").partition(": ")
        raise (LookupError if kind == "LookupError" else ValueError)(text or f"reward {name!r} did not load: {kind}")


@functools.cache
def _own_grader(process_id: int) -> GraderProcess:
    """This process's grader; by process id, because a fork must not talk on its parent's socket."""
    grader = GraderProcess()
    atexit.register(grader.close)
    return grader


def warm_up(name: str, options: Mapping[str, Any]) -> Call:
    """What a grader process does before its first sample: import the reward and check its options."""
    return Call("milepost.tasks.rewards:check_reward", (name, dict(options)))


async def _awaited(said: Any) -> Any:
    return await said


def _from_answer(answer: Answer, grader: str) -> Verdict:
    if answer.reason is not None:
        return Verdict(None, reason=answer.reason, grader=grader, seconds=answer.seconds)
    return Verdict(**answer.value)


def _verdict(name: str, said: Any) -> Verdict:
    """What a reward returned as a verdict with a finite score."""
    verdict = said if isinstance(said, Verdict) else Verdict(_number(name, said))
    score = None if verdict.score is None else _number(name, verdict.score)
    reason = verdict.reason
    if score is not None and not math.isfinite(score):
        score, reason = None, f"not finite: {score}"
    elif score is None and not reason:
        reason = "unscorable"
    parts = {key: float(value) for key, value in verdict.parts.items() if math.isfinite(value)}
    return replace(verdict, score=score, reason=reason, parts=parts)


def _number(name: str, value: Any) -> float | None:
    scalar = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if scalar is None:
        return None
    if not isinstance(scalar, numbers.Real):
        raise ValueError(f"reward {name!r} returned {value!r}, it must return a number, a bool, a Verdict or None")
    return float(scalar)
