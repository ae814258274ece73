"""How ranks share the columns of a row of tokens: chunks of every sample, balanced for attention under a causal mask.

Each sample is cut into twice as many equal chunks as there are context-parallel ranks, and rank r of R has chunks r and
2R - 1 - r of all of them: what a rank attends to is then the same for all.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSplit:
    """This context-parallel rank of `ranks`. Sequence-parallel ranks have an even part each of what it has."""

    rank: int = 0
    ranks: int = 1
    sequence_ranks: int = 1

    def padded(self, lengths: list[int]) -> list[int]:
        """Columns for samples of `lengths` in one row: each can be cut into chunks, and the row among all ranks."""
        each = 2 * self.ranks if self.ranks > 1 else 1
        columns = [-(-length // each) * each for length in lengths]
        columns[-1] += -sum(columns) % math.lcm(each, self.ranks * self.sequence_ranks)
        return columns

    def own(self, table: Tensor) -> Tensor:
        """This rank's chunks of `table`, which has one row a chunk, behind each other."""
        return table[self.chunks].flatten(0, 1)

    @property
    def chunks(self) -> list[int]:
        return [self.rank, 2 * self.ranks - 1 - self.rank]

    @property
    def order(self) -> list[int]:
        """The chunks of all ranks, as they come when the ranks' parts are put behind each other."""
        return [chunk for rank in range(self.ranks) for chunk in RowSplit(rank, self.ranks).chunks]


WHOLE = RowSplit()
"""One rank with everything."""


def chunk_columns(starts: Tensor, columns: int, ranks: int) -> Tensor:
    """Which of the `columns` of a row are chunk k of its samples, in row k of the result, `[2 * ranks, columns each]`.

    `starts` says where samples begin, and at last where the row ends. Nothing waits for the device.
    """
    count = 2 * ranks
    units = starts.long() // count
    places = torch.arange(columns // count, device=starts.device)
    sample = torch.bucketize(places, units[1:], right=True)
    size = units[sample + 1] - units[sample]
    chunk = torch.arange(count, device=starts.device)[:, None]
    return starts[sample] + chunk * size + places - units[sample]
