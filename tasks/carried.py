"""Going on with groups that the step before did not finish: which, and what it has made of their samples."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.engines.protocols import Generate, WeightVersion
from milepost.storage.carried import carried_groups, interrupted_groups
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.prompt_order import group_id
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, concat, read_table, with_columns
from milepost.storage.text import from_json, unescape
from milepost.tasks.rollouts import RolloutFunction, RolloutParams
from milepost.tasks.samples import LOST_TOKENS, REFILLED, Prompt, Sample

CUT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Carried:
    """`groups` has the former id of each group that is served again, and `tables` what became of it then."""

    groups: dict[str, str] = field(default_factory=dict)
    tables: tuple[TableRef, ...] = ()


NOTHING_CARRIED = Carried()


@dataclass(frozen=True)
class Unfinished:
    """What a step left: its unfinished groups in order, its prompts, and its rollouts."""

    groups: tuple[str, ...] = ()
    prompts: tuple[TableRef, ...] = ()
    rollouts: tuple[TableRef, ...] = ()

    def served_again(self, step: int, first: int) -> tuple[pa.Table, dict[str, str]]:
        """Their prompts under ids of step `step` from position `first` on, and the former id of each."""
        former = list(self.groups)
        table = concat([read_table(ref) for ref in self.prompts], PROMPTS)
        rows = pc.index_in(pa.array(former, pa.string()), table["group_id"].combine_chunks())
        new = [group_id(step, 0, first + position) for position in range(len(former))]
        return with_columns(table.take(rows), {"group_id": list(new)}), dict(zip(new, former, strict=True))

    def carried(self, commit: Commit) -> Carried:
        """As what a step goes on with; `commit` is that of its first prompts."""
        return Carried(carried_groups(commit.record), self.rollouts)


def unfinished(store: StepStore) -> Unfinished:
    """What the step before that of `store` left."""
    commits = store.at(store.step - 1).commits()
    rollouts = _tables(commits, "filter", "rollouts")
    groups = tuple(interrupted_groups(map(read_table, rollouts)))
    return Unfinished(groups, _tables(commits, "sample", "prompts"), rollouts) if groups else Unfinished()


def _tables(commits: Iterable[Commit], stage: str, name: str) -> tuple[TableRef, ...]:
    return tuple(commit.tables[name] for commit in commits if Slot.parse(commit.slot).stage == stage)


@dataclass(frozen=True)
class Earlier:
    """What a step before made of a sample, with the seed it was drawn with."""

    sample: Sample
    seed: int

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason != "abort"

    def as_of(self, version: WeightVersion, *, masked: bool) -> Sample:
        """The sample in a step with weights `version`: `masked` leaves tokens of older ones untrained."""
        older = masked and self.sample.last_version.step < version.step
        return replace(self.sample, loss_mask=[0] * len(self.sample.token_ids)) if older else self.sample


def earlier_samples(carried: Carried, groups: Iterable[str]) -> dict[str, Earlier]:
    """What there is of the samples of `groups`, by their new ids; one of which nothing can be used starts again.

    That is one without tokens or log-probabilities, or that was cut within a character: its text has no continuation.
    """
    new = {carried.groups[group]: group for group in groups if group in carried.groups}
    wanted = pa.array(list(new), pa.string())
    found = {}
    for table in map(read_table, carried.tables):
        for row in table.filter(pc.is_in(table["group_id"], wanted)).to_pylist():
            sample = _stored_sample(row) if row["response_token_ids"] and row["rollout_logprobs"] else None
            if sample and (sample.finish_reason != "abort" or not sample.response.endswith(CUT_CHARACTER)):
                name = new[row["group_id"]] + row["sample_id"].removeprefix(row["group_id"])
                found[name] = Earlier(sample, row["seed"])
    return found


def _stored_sample(row: dict[str, Any]) -> Sample:
    """As it is stored, but for what the step that stored it has lost: that was counted there."""
    metadata = from_json(row["metadata"])
    return Sample(
        response=unescape(row["response"], row["response_escaped"]),
        token_ids=row["response_token_ids"],
        logprobs=row["rollout_logprobs"],
        loss_mask=row["loss_mask"],
        finish_reason=row["finish_reason"],
        first_version=WeightVersion(row["weight_version_min"], row["weights_digest"]),
        last_version=WeightVersion(row["weight_version_max"], row["weights_digest"]),
        turns=row["turns"],
        metadata={name: value for name, value in metadata.items() if name not in (REFILLED, LOST_TOKENS)},
    )


async def go_on(
    generate: Generate, function: RolloutFunction, prompt: Prompt, params: RolloutParams, before: Sample
) -> Sample:
    """The sample from where it stopped, as long as one that nobody stopped; without room it is truncated as it is."""
    left = params.sampling["max_new_tokens"] - len(before.token_ids)
    longer = replace(prompt, token_ids=[*prompt.token_ids, *before.token_ids])
    if left < 1 or len(longer.token_ids) >= params.context_length:
        return replace(before, finish_reason="length")
    rest = await function(generate, longer, replace(params, sampling=params.sampling | {"max_new_tokens": left}))
    assert isinstance(rest, Sample)  # of `single_turn`
    if not rest.token_ids:
        return replace(before, finish_reason=rest.finish_reason)
    return replace(
        rest,
        response=before.response + rest.response,
        token_ids=[*before.token_ids, *rest.token_ids],
        logprobs=[*before.logprobs, *rest.logprobs],
        loss_mask=[*before.loss_mask, *rest.loss_mask],
        first_version=before.first_version,
    )
