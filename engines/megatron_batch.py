"""A rollouts table as a trainer rank sees it: samples, their split over ranks and micro-batches, and their tensors.

Every rank reads the whole table and derives the same split, so ranks agree without talking.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.engines.megatron_attention import boundaries
from milepost.engines.row_split import WHOLE, RowSplit, chunk_columns
from milepost.storage.micro_batches import trained_lengths

CRITIC_COLUMNS = ("values", "returns")
_OPTIONAL_COLUMNS = ("ref_logprobs", "importance_weights", *CRITIC_COLUMNS)  # all samples of a batch have, or none
_LOSS_COLUMNS = ("loss_mask", "advantages", "old_logprobs", "rollout_logprobs", *_OPTIONAL_COLUMNS)


@dataclass(frozen=True)
class Sample:
    """One row: its place in the table, its tokens, and its per-response-token columns (those that are not null)."""

    row: int
    sample_id: str
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    columns: dict[str, NDArray[np.float32]]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Samples, each without its last token, which predicts nothing: padded at the end, or packed behind each other.

    `tokens` is `[batch, time]`, or `[1, tokens]` when packed; `places` are the rotary positions of its columns and
    `boundaries` where packed samples begin (see megatron_attention), None when padded. `positions` are the flat indices
    in `tokens` that predict a response token, `targets` those tokens. `columns` are `[batch, time]` float32 either way,
    with each response token's value at the place that predicts it and zeros elsewhere; `cells` are those flat places.

    A context-parallel rank has its chunks of `tokens` and `places`, and the positions and targets in them: `own` says
    which of `cells` those are, None when all. `columns` and `boundaries` are of whole samples.
    """

    samples: list[Sample]
    tokens: Tensor
    places: Tensor
    boundaries: Tensor | None
    positions: Tensor
    targets: Tensor
    columns: dict[str, Tensor]
    cells: Tensor
    own: Tensor | None


def _arrays(table: pa.Table, name: str) -> list[NDArray[np.generic] | None]:
    column = table.column(name)
    return [value.values.to_numpy(zero_copy_only=False) if value.is_valid else None for value in column]


def read_samples(table: pa.Table, vocab: int) -> list[Sample]:
    """Rows with a response. Refused are columns without one value per response token, and tokens past `vocab`."""
    prompts, responses = _arrays(table, "prompt_token_ids"), _arrays(table, "response_token_ids")
    values = {name: _arrays(table, name) for name in _LOSS_COLUMNS}
    samples = []
    for row, sample_id in enumerate(table.column("sample_id").to_pylist()):
        prompt, response = prompts[row], responses[row]
        assert prompt is not None and response is not None
        columns = {name: found[row].astype(np.float32) for name, found in values.items() if found[row] is not None}
        for name, found in columns.items():
            if len(found) != len(response):
                counts = f"{len(found)} values of {name} for {len(response)} response tokens"
                raise ValueError(f"sample {sample_id!r} has {counts}: they must be as many")
        if not len(response):
            continue
        if not len(prompt):
            raise ValueError(f"sample {sample_id!r} has an empty prompt: nothing predicts its first token")
        highest = int(max(prompt.max(), response.max()))
        if highest >= vocab or min(prompt.min(), response.min()) < 0:
            raise ValueError(
                f"sample {sample_id!r} has token {highest}, the model has {vocab}: it has another tokenizer"
            )
        samples.append(Sample(row, sample_id, prompt, response, columns))
    return samples


def trained_samples(table: pa.Table, vocab: int) -> list[Sample]:
    """Samples that were not dropped and have a token to train, each with what the loss needs."""
    trained = trained_lengths(table)
    samples = [sample for sample in read_samples(table, vocab) if sample.row in trained]
    for sample in samples:
        for name in ("advantages", "old_logprobs"):
            if name not in sample.columns:
                raise ValueError(f"sample {sample.sample_id!r} has no {name}: fill the column before the step")
    for name in _OPTIONAL_COLUMNS:
        filled = sum(name in sample.columns for sample in samples)
        if filled not in (0, len(samples)):
            raise ValueError(f"{filled} of {len(samples)} samples have {name}: fill all of them or none")
    if not all("rollout_logprobs" in sample.columns for sample in samples):
        return [_without(sample, "rollout_logprobs") for sample in samples]  # only reported on: of all or of none
    return samples


def _without(sample: Sample, column: str) -> Sample:
    return replace(sample, columns={name: found for name, found in sample.columns.items() if name != column})


def loss_columns(samples: list[Sample]) -> list[str]:
    """The per-token columns of the policy's loss that `trained_samples` have, which are the same for all of them."""
    return [name for name in samples[0].columns if name not in CRITIC_COLUMNS] if samples else []


def value_columns(samples: list[Sample]) -> list[str]:
    """The per-token columns of the critic's loss, which `trained_samples` must have for it."""
    for name in CRITIC_COLUMNS:
        if name not in samples[0].columns:
            raise ValueError(f"sample {samples[0].sample_id!r} has no {name}: fill the column before the critic's step")
    return ["loss_mask", *CRITIC_COLUMNS]


def micro_batch(
    samples: list[Sample], names: list[str], device: torch.device, *, packing: bool, ranks: RowSplit = WHOLE
) -> MicroBatch:
    """`samples` and their columns `names` as tensors; no samples give one padding token and no positions."""
    lengths = [sample.tokens - 1 for sample in samples] or [1]
    time = max(lengths)
    cells = np.arange(len(lengths)) * time  # where each sample begins in `columns`
    rows = ranks.padded(lengths) if packing else ranks.padded([time]) * len(lengths)
    starts = np.cumsum([0, *rows[:-1]])
    tokens = np.zeros(sum(rows), np.int64)
    for start, sample in zip(starts, samples, strict=False):
        tokens[start : start + sample.tokens - 1] = np.concatenate([sample.prompt, sample.response])[:-1]
    inside = [len(sample.prompt) - 1 + np.arange(len(sample.response)) for sample in samples]
    columns = {name: np.zeros((len(lengths), time), np.float32) for name in names}
    where = _joined([cell + places for cell, places in zip(cells, inside, strict=False)], np.int64)
    for name, values in columns.items():
        values.reshape(-1)[where] = _joined([sample.columns[name] for sample in samples], np.float32)
    positions = _joined([start + places for start, places in zip(starts, inside, strict=False)], np.int64)
    targets = _joined([sample.response for sample in samples], np.int64)
    tokens = tokens.reshape(1 if packing else len(lengths), -1)
    parts = rows if packing else rows[:1]  # of a row: padded rows have the same
    places, own = np.concatenate([np.arange(part) for part in parts]), None
    if ranks.ranks > 1:
        chunks = _own_columns(parts, ranks)
        positions, own = _inside(positions, chunks, tokens.shape[1])
        tokens, places, targets = tokens.take(chunks, axis=1), places[chunks], targets[own]
    return MicroBatch(
        samples=samples,
        tokens=torch.from_numpy(tokens).to(device),
        places=torch.from_numpy(places).to(device),
        boundaries=boundaries(rows, device) if packing else None,
        positions=torch.from_numpy(positions).to(device),
        targets=torch.from_numpy(targets).to(device),
        columns={name: torch.from_numpy(values).to(device) for name, values in columns.items()},
        cells=torch.from_numpy(where).to(device),
        own=None if own is None else torch.from_numpy(own).to(device),
    )


def _own_columns(lengths: list[int], ranks: RowSplit) -> NDArray[np.int64]:
    """The columns of a row of samples of `lengths` that this context-parallel rank has, in its order."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return ranks.own(chunk_columns(starts, int(starts[-1]), ranks.ranks)).numpy()


def _inside(
    positions: NDArray[np.int64], columns: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Those flat `positions` in rows of `width` that lie in `columns`, counted among these, and which they are."""
    place = np.full(width, -1)
    place[columns] = np.arange(len(columns))
    found = place[positions % width]
    own = np.flatnonzero(found >= 0)
    return positions[own] // width * len(columns) + found[own], own


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
