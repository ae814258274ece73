"""Rewards, and a rollout function and an advantage, that behave and misbehave as told."""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from milepost.engines.protocols import Generate
from milepost.tasks.advantages import get_advantage
from milepost.tasks.rollouts import RolloutParams, single_turn
from milepost.tasks.samples import Prompt, Sample

GENERATED: list[str] = []
"""The samples that `recorded_turn` was asked for in this process."""


def parity(sample: Any) -> float:
    """Depends on the response alone, and differs inside most groups."""
    return float(len(sample.response) % 2)


def always_one(sample: Any) -> float:
    return 1.0


def told(sample: Any, path: str) -> float:
    """What the file at `path` says now."""
    with open(path) as file:
        return float(file.read())


def keyed(sample: Any, api_key: str, url: str) -> float:
    """`parity` for whoever has a key; for the prompt 4+1= an error that tells it."""
    if sample.prompt == "4+1=" or not api_key.startswith("Zq"):
        raise RuntimeError(f"401 for {url} with {api_key}")
    return parity(sample)


def breaks(sample: Any) -> float:
    raise RuntimeError("this reward is broken")


def hang_or_raise(sample: Any) -> float:
    """Hangs on the prompt 3+1=, raises on 4+1=."""
    if sample.prompt == "3+1=":
        time.sleep(60)
    if sample.prompt == "4+1=":
        raise RuntimeError("no verdict")
    return 1.0


def recorded(sample: Any, log: str) -> float:
    """`parity`, and a line in the file `log`."""
    with open(log, "a") as file:
        file.write(f"{sample.prompt} {os.getpid()}\n")
    return parity(sample)


async def recorded_turn(generate: Generate, prompt: Prompt, params: RolloutParams) -> Sample:
    GENERATED.append(params.sample_id)
    return await single_turn(generate, prompt, params)


def breaks_in_step_one(rollouts: pa.Table, params: Mapping[str, Any]) -> list[list[float]]:
    """GRPO's, but while the file that MILEPOST_TEST_BREAK names exists, step 1 fails."""
    if rollouts["step"][0].as_py() == 1 and os.path.exists(os.environ["MILEPOST_TEST_BREAK"]):
        raise RuntimeError("broken as told")
    return get_advantage("grpo")(rollouts, {})


async def second_set_breaks(generate: Generate, prompt: Prompt, params: RolloutParams) -> Sample:
    """`recorded_turn`, but while the file that MILEPOST_TEST_BREAK names exists, the second set evaluated fails."""
    if prompt.group_id.startswith("eval-000000-1-") and os.path.exists(os.environ["MILEPOST_TEST_BREAK"]):
        raise RuntimeError("broken as told")
    return await recorded_turn(generate, prompt, params)


def connects(sample: Any, url: str) -> float:
    """1.0 where the server at `url` can be reached."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5):
        return 1.0


def even(sample: Any, least: int = 0) -> float:
    """Takes labels that are even numbers, and hangs on one."""
    return parity(sample)


def even_label_problem(label: Any, options: Mapping[str, Any]) -> str:
    if label == "hang":
        time.sleep(60)
    if label == "die":
        os._exit(1)
    if label % 2:
        return f"it is odd: give an even number from {options.get('least', 0)} on"
    return ""


async def second_evaluation_waits(generate: Generate, prompt: Prompt, params: RolloutParams) -> Sample:
    """While the file that MILEPOST_TEST_WAIT names exists, the weights after two steps are evaluated and do not end."""
    while prompt.group_id.startswith("eval-000002-") and os.path.exists(os.environ.get("MILEPOST_TEST_WAIT", "")):
        await asyncio.sleep(0.1)
    return await single_turn(generate, prompt, params)
