"""A rollouts table as a trainer rank sees it: samples, their split over ranks and micro-batches, and padded tensors.

Every rank reads the whole table and derives the same split, so ranks agree without talking.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.engines.batching import balance, pack_padded

_LOSS_COLUMNS = ("loss_mask", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs")


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
    """Samples padded at the end. `tokens` is `[batch, time]`; position p of it predicts the token after it.

    `positions` are the flat indices in `tokens` that predict a response token, `targets` those tokens. `columns` are
    `[batch, time]` float32, with each response token's value at the position that predicts it and zeros elsewhere.
    """

    samples: list[Sample]
    tokens: Tensor
    positions: Tensor
    targets: Tensor
    columns: dict[str, Tensor]


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
    kept = table.column("kept").to_pylist()
    samples = [sample for sample in read_samples(table, vocab) if kept[sample.row] is not False]
    samples = [sample for sample in samples if sample.columns["loss_mask"].any()]
    for sample in samples:
        for name in ("advantages", "old_logprobs"):
            if name not in sample.columns:
                raise ValueError(f"sample {sample.sample_id!r} has no {name}: fill the column before the step")
    with_reference = sum("ref_logprobs" in sample.columns for sample in samples)
    if with_reference not in (0, len(samples)):
        raise ValueError(f"{with_reference} of {len(samples)} samples have ref_logprobs: fill all of them or none")
    return samples


def split(samples: list[Sample], max_tokens: int, *, rank: int, ranks: int) -> list[list[Sample]]:
    """The micro-batches of data-parallel `rank`: as many on every rank, the last ones empty where samples ran out."""
    packed = []
    for part in balance([sample.tokens for sample in samples], ranks):
        bins = pack_padded([samples[index].tokens for index in part], max_tokens)
        packed.append([[samples[part[index]] for index in indices] for indices in bins])
    count = max(1, *(len(bins) for bins in packed))
    own = packed[rank]
    return own + [[] for _ in range(count - len(own))]


def loss_columns(samples: list[Sample]) -> list[str]:
    """The per-token columns that `trained_samples` have, which are the same for all of them."""
    return list(samples[0].columns) if samples else []


def micro_batch(samples: list[Sample], names: list[str], device: torch.device) -> MicroBatch:
    """`samples` and their columns `names` as padded tensors; no samples give one padding token and no positions."""
    time = max([1, *(sample.tokens - 1 for sample in samples)])  # the last token predicts nothing
    tokens = np.zeros((max(1, len(samples)), time), np.int64)
    positions, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    columns = {name: np.zeros(tokens.shape, np.float32) for name in names}
    for index, sample in enumerate(samples):
        tokens[index, : sample.tokens - 1] = np.concatenate([sample.prompt, sample.response])[:-1]
        start = len(sample.prompt) - 1
        where = slice(start, start + len(sample.response))
        positions.append(index * time + np.arange(where.start, where.stop))
        targets.append(sample.response.astype(np.int64))
        for name in columns:
            columns[name][index, where] = sample.columns[name]
    return MicroBatch(
        samples,
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
        {name: torch.from_numpy(values).to(device) for name, values in columns.items()},
    )
