"""What a step's samples were like, in numbers: under Miles' names where they mean the same."""

import zlib
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.carried import INTERRUPTED
from milepost.storage.text import from_json
from milepost.tasks.samples import LOST_TOKENS
from milepost.tasks.verdict import failure_kind

_READ = [
    "group_id",
    "reward",
    "kept",
    "status",
    "drop_reason",
    "verdict",
    "response",
    "response_token_ids",
    "loss_mask",
    "weight_version_min",
    "weight_version_max",
    "metadata",
]

REPEATED_CHARACTERS = 10_000
REPEATED_RATIO = 10


def rollout_metrics(
    table: pa.Table, *, trained: Collection[str] | None = None, reused_tokens: int = 0
) -> dict[str, float]:
    """Numbers over the samples of a step. Rewards that are null leave the reward's statistics.

    `trained` are the groups that reached an optimizer batch, None where nothing is trained; `reused_tokens` those that
    an earlier step has generated.
    """
    table = table.select(_READ)
    status = Counter(table["status"].to_pylist())
    kept = np.asarray(table["kept"].to_pylist(), dtype=bool)
    return (
        {
            "rollout/samples": float(table.num_rows),
            "rollout/truncated_ratio": status["truncated"] / table.num_rows,
            "rollout/unscorable": float(table["reward"].null_count),
            "rollout/kept_ratio": float(kept.mean()),
            "rollout/aborted": float(status["aborted"]),
            "rollout/interrupted": float(status[INTERRUPTED]),
            "rollout/invalid": float(status["invalid"]),
            "rollout/repetition_frac": float(np.mean([is_repetitive(text) for text in table["response"].to_pylist()])),
        }
        | _lengths(table)
        | _efficiency(table, kept, trained, reused_tokens)
        | _versions(table)
        | _rewards(table)
        | _errors(table)
        | _zero_std(table)
    )


def dropped_groups(accounting: Mapping[str, int]) -> dict[str, float]:
    """How many groups were dropped, by reason."""
    prefix = "filtered: "
    return {
        f"rollout/dynamic_filter/drop_{name.removeprefix(prefix)}": float(count)
        for name, count in accounting.items()
        if name.startswith(prefix)
    }


def engine_metrics(work: Mapping[str, float]) -> dict[str, float]:
    """What of prompts was cached, and of drafts accepted, from the sums of EngineWork; nothing where none was told."""
    found = {}
    if work.get("samples"):
        cached, prompts = work["cached_tokens"], work["prompt_tokens"]
        found["rollout/prefix_cache_hit_rate"] = cached / prompts if prompts else 0.0
        found["rollout/avg_cached_tokens_per_sample"] = cached / work["samples"]
    if verified := work.get("verified_drafts"):
        found["rollout/spec_accept_rate"] = work["accepted_shares"] / verified
        found["rollout/spec_accept_length"] = work["drafted_tokens"] / verified
    return found


def is_repetitive(response: str) -> bool:
    """Whether a long response ends in what says hardly anything: its last 10,000 characters shrink to a tenth."""
    if len(response) <= REPEATED_CHARACTERS:
        return False
    tail = response[-REPEATED_CHARACTERS:].encode()
    return len(tail) > REPEATED_RATIO * len(zlib.compress(tail))


def _sums(column: pa.ChunkedArray) -> np.ndarray:
    """The sum of each list."""
    lengths = pc.list_value_length(column).to_numpy()
    before = np.concatenate([[0], np.cumsum(pc.list_flatten(column).to_numpy().astype(np.int64))])
    ends = np.cumsum(lengths)
    sums: np.ndarray = before[ends] - before[ends - lengths]
    return sums


def _lengths(table: pa.Table) -> dict[str, float]:
    """Of responses, in trained tokens."""
    return _statistics("rollout/response_len", _sums(table["loss_mask"]))


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/median": float(np.median(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def _efficiency(
    table: pa.Table, kept: np.ndarray, trained: Collection[str] | None, reused_tokens: int
) -> dict[str, float]:
    """Tokens that the engines generated in this step, and how many of its tokens are trained on for each of them."""
    lengths = pc.list_value_length(table["response_token_ids"]).to_numpy()
    generated = float(lengths.sum()) - reused_tokens + _lost_tokens(table)
    if trained is not None:
        kept = kept & np.asarray([group in trained for group in table["group_id"].to_pylist()])
    return {
        "rollout/tokens": generated,
        "rollout/efficiency": float(lengths[kept].sum()) / generated if generated else 0.0,
    }


def _lost_tokens(table: pa.Table) -> int:
    """Of samples that were made again."""
    rows = table["metadata"].filter(pc.match_substring(table["metadata"], f'"{LOST_TOKENS}"'))
    return sum(from_json(metadata).get(LOST_TOKENS, 0) for metadata in rows.to_pylist())


def _versions(table: pa.Table) -> dict[str, float]:
    """Of the oldest weights that made a token of a sample, and how many samples are of several."""
    oldest = table["weight_version_min"].drop_null().to_numpy()
    if not len(oldest):
        return {}
    mixed = pc.sum(pc.not_equal(table["weight_version_min"], table["weight_version_max"])).as_py()
    return _statistics("rollout/weight_version", oldest) | {
        "rollout/weight_version/mixed_version_ratio": mixed / len(oldest),
    }


def _rewards(table: pa.Table) -> dict[str, float]:
    rewards = np.asarray(table["reward"].drop_null(), dtype=float)
    if not len(rewards):
        return {}
    return {"rollout/reward": float(rewards.mean()), "rollout/reward/std": float(rewards.std())}


def _errors(table: pa.Table) -> dict[str, float]:
    """Samples that nothing came of, by kind of what went wrong; those without a score by what their verdict says."""
    lost = table.filter(pc.is_in(table["drop_reason"], pa.array(["aborted", "invalid", "empty", "unscorable"])))
    reasons, verdicts = lost["drop_reason"].to_pylist(), lost["verdict"].to_pylist()
    kinds = Counter(
        failure_kind(from_json(verdict)["reason"]) if reason == "unscorable" and verdict else reason
        for reason, verdict in zip(reasons, verdicts, strict=True)
    )
    return {f"rollout/error_cat/{kind}": float(count) for kind, count in sorted(kinds.items())}


def _zero_std(table: pa.Table) -> dict[str, float]:
    """Groups whose rewards are all equal, by reward, and the percentage of groups that are all 0, and all 1."""
    groups: dict[str, list[float]] = {}
    scored = table.filter(pc.is_valid(table["reward"]))
    for group, reward in zip(scored["group_id"].to_pylist(), scored["reward"].to_pylist(), strict=True):
        groups.setdefault(group, []).append(reward)
    equal = Counter(rewards[0] for rewards in groups.values() if len(rewards) > 1 and min(rewards) == max(rewards))
    shown: Counter[str] = Counter()
    for reward, count in equal.items():
        shown[f"{round(reward, 1):g}"] += count
    percent = 100.0 / max(len(groups), 1)
    return {f"rollout/zero_std/count_{reward}": float(count) for reward, count in sorted(shown.items())} | {
        "rollout/zero_std/all_zero_percentage": percent * equal[0.0],
        "rollout/zero_std/all_one_percentage": percent * equal[1.0],
    }
