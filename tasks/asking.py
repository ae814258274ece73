"""The rows of one sample: asked for, gone on with, or asked for again, and what it means when nothing came."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.engines.protocols import Generate, WeightVersion
from milepost.router.client import GenerationStopped
from milepost.router.completions import UnsoundCompletion
from milepost.storage.text import from_json, to_json
from milepost.storage.tombstones import TOMBSTONE
from milepost.tasks.carried import Earlier, go_on
from milepost.tasks.rollouts import RolloutFunction, RolloutParams
from milepost.tasks.samples import LOST_TOKENS, REFILLED, Prompt, Sample, invalid, row, unasked
from milepost.tasks.sampling import Sampling, sampling_seed
from milepost.tasks.tools import Toolbox

Rows = list[dict[str, Any]]

_LOST = ("aborted", "invalid")


@dataclass(frozen=True)
class Asking:
    """How samples are asked for. `earlier` is what a step before has made of some; once `stop` is set none is asked."""

    generate: Generate
    function: RolloutFunction
    sampling: Sampling
    version: WeightVersion | None = None
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    tools: Toolbox | None = None

    async def rows(self, prompt: Prompt, index: int) -> Rows:
        """The rows of sample `index` of a group. One that the engine lost is asked for again, with another seed."""
        sample_id = f"{prompt.group_id}-{index:03d}"
        if prompt.content == TOMBSTONE:
            return [unasked(prompt, **self._names(sample_id, 0))]
        before = self.earlier.get(sample_id)
        if before is not None and before.finished:
            names = self._names(sample_id, 0) | {"seed": before.seed}
            return [row(prompt, self._as_of_now(before), **names)]
        refills = lost_tokens = 0
        rows = await self._rows_once(prompt, sample_id, before, 0)
        while refills < self.sampling.refills and _is_lost(rows) and not self.stop.is_set():
            refills += 1
            lost_tokens += _generated(rows, before)
            rows = await self._rows_once(prompt, sample_id, before, refills)
        return [_told(rows[0], {REFILLED: refills, LOST_TOKENS: lost_tokens}), *rows[1:]] if refills else rows

    def _names(self, sample_id: str, refill: int) -> dict[str, Any]:
        drawn = f"{sample_id}+{refill}" if refill else sample_id
        seed = sampling_seed(self.sampling.seed, drawn)
        return {"sample_id": sample_id, "seed": seed, "sampling": self.sampling.params}

    def _as_of_now(self, before: Earlier) -> Sample:
        if self.version is None:
            return before.sample
        return before.as_of(self.version, masked=self.sampling.mask_older_tokens)

    async def _rows_once(self, prompt: Prompt, sample_id: str, before: Earlier | None, refill: int) -> Rows:
        names = self._names(sample_id, refill)
        try:
            samples = await self._samples(prompt, before, names)
        except UnsoundCompletion as unsound:
            return [invalid(prompt, unsound, **names)]
        except GenerationStopped:
            return [row(prompt, before.sample, **names) if before else unasked(prompt, **names)]
        ids = [sample_id] if len(samples) == 1 else [f"{sample_id}.{part}" for part in range(len(samples))]
        parts = zip(ids, samples, strict=True)
        return [row(prompt, sample, **names | {"sample_id": name}) for name, sample in parts]

    async def _samples(self, prompt: Prompt, before: Earlier | None, names: dict[str, Any]) -> list[Sample]:
        """What the rollout function made. A function that returns several samples gives each its own id."""
        seeded = self.sampling.params | {"sampling_seed": names["seed"]}
        params = RolloutParams(names["sample_id"], seeded, self.sampling.context_length, self.tools)
        if before is not None:
            return [await go_on(self.generate, self.function, prompt, params, self._as_of_now(before))]
        found = await self.function(self.generate, prompt, params)
        return found if isinstance(found, list) else [found]


def _is_lost(rows: Rows) -> bool:
    return any(found["status"] in _LOST for found in rows)


def _generated(rows: Rows, before: Earlier | None) -> int:
    """Tokens of rows that are not of `before`; an invalid one has none of that."""
    count = sum(len(found["response_token_ids"]) for found in rows)
    return count - len(before.sample.token_ids) if before and rows[0]["status"] != "invalid" else count


def _told(found: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The row with more in its metadata."""
    return found | {"metadata": to_json({**from_json(found["metadata"]), **said})}
