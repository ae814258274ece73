"""The samples that a report shows: the worst and the best of the newest step, token by token."""

import json
from dataclasses import dataclass
from math import exp
from typing import Any

from milepost.flows.sample_view import logprobs_of, shade, stored_sample, turns
from milepost.flows.sql import as_rows, query
from milepost.storage.runs import RunFolder
from milepost.storage.tombstones import TOMBSTONE_JSON

SHOWN = 4  # of each kind
LONGEST = 600  # tokens of a strip

_ENDS = """
with newest as (
    select group_id, min_by(sample_id, reward) as low, min(reward) as lowest,
        max_by(sample_id, reward) as high, max(reward) as highest
    from rollouts
    where prompt != '{purged}' and reward is not null
        and step = (select max(step) from rollouts where prompt != '{purged}' and reward is not null)
    group by group_id
)
(select 'worst' as kind, low as sample_id from newest order by lowest, group_id limit {shown})
union all
(select 'best' as kind, high as sample_id from newest order by highest desc, group_id desc limit {shown})
"""


@dataclass(frozen=True)
class Token:
    """A token of a response: `shade` is 0 for one that the model was sure of, up to 3 for a surprise; None: unknown."""

    text: str
    probability: float | None
    shade: int | None
    trained: bool


@dataclass(frozen=True)
class ShownSample:
    """A sample as the report has it; `cut` says that tokens were left out at its end."""

    kind: str
    sample_id: str
    turns: list[tuple[str, str]]
    tokens: list[Token]
    cut: bool
    label: str
    reward: float | None
    reason: str
    weights: str


def ends(folder: RunFolder) -> list[ShownSample]:
    """The worst and the best samples of the newest step that has a reward, one a group; none of a run without one."""
    _, rows = as_rows(query([folder], _ENDS.format(shown=SHOWN, purged=TOMBSTONE_JSON)))
    kinds = {sample: kind for kind, sample in reversed(rows)}  # in a small step the worst may be the best, too
    return [_shown(kind, stored_sample(folder, sample)) for sample, kind in reversed(kinds.items())]


def _shown(kind: str, row: dict[str, Any]) -> ShownSample:
    found = list(zip(row["tokens"], logprobs_of(row), row["loss_mask"], strict=True))
    verdict = json.loads(str(row["verdict"] or "{}"))
    return ShownSample(
        kind=kind,
        sample_id=str(row["sample_id"]),
        turns=turns(row)[:-1],
        tokens=[_token(text, logprob, bool(mask)) for text, logprob, mask in found[:LONGEST]],
        cut=len(found) > LONGEST,
        label=str(row["label"]),
        reward=row["reward"],
        reason=verdict.get("reason") or "",
        weights=f"{row['weight_version_min']} ({row['weights_digest']})",
    )


def _token(text: str, logprob: float | None, trained: bool) -> Token:
    if logprob is None:
        return Token(text, None, None, trained)
    return Token(text, exp(logprob), shade(logprob), trained)
