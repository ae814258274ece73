"""The micro-batches of an optimizer batch: which of its samples share a pass, and on which data-parallel rank.

They follow from the lengths of the samples alone, so ranks agree on them without talking. They are stored with the
step, and `verify` works them out again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.packing import balance, pack, pack_padded
from milepost.storage.parameters import ModelSection
from milepost.storage.training import PerfSection

Cost = tuple[int, int]
"""What a sample costs: the first for each of its tokens, the second for each pair of them."""

TOKENS: Cost = (1, 0)


@dataclass(frozen=True)
class PackingRules:
    """What the micro-batches of any batch keep to. Of `balance` only the name is here: flops are the model's."""

    ranks: int
    max_tokens: int
    packing: bool
    balance: Literal["tokens", "flops"]


def packing_rules(model: ModelSection, perf: PerfSection) -> PackingRules:
    return PackingRules(model.data_parallel, perf.max_tokens_per_micro_batch, perf.packing, perf.balance)


@dataclass(frozen=True)
class MicroBatches:
    """Rows of the batch's table by rank and micro-batch. `cost` is what ranks were balanced by."""

    rules: PackingRules
    cost: Cost
    rows: list[list[list[int]]]

    def to_json(self) -> dict[str, Any]:
        """A micro-batch is one word of text: JSON that is written with indents has a line for each number."""
        rows = [[" ".join(map(str, rows)) for rows in rank] for rank in self.rows]
        return {**vars(self.rules), "cost": list(self.cost), "rows": rows}

    @staticmethod
    def parse(content: Mapping[str, Any]) -> "MicroBatches":
        """From `to_json`; KeyError, TypeError or ValueError when it is not that."""
        rules = {name: value for name, value in content.items() if name not in ("cost", "rows")}
        linear, quadratic = content["cost"]
        rows = [[[int(row) for row in text.split()] for text in rank] for rank in content["rows"]]
        return MicroBatches(PackingRules(**rules), (int(linear), int(quadratic)), rows)

    def metrics(self, lengths: Mapping[int, int]) -> dict[str, float]:
        """How many passes the busiest rank makes, how full they are of what they may hold, and its share of the work.

        `packing_efficiency` is tokens over the budgets of all micro-batches, where one that is over its budget counts
        as full; `imbalance` is the cost of the busiest rank over the mean of the ranks.
        """
        sums = [sum(lengths[row] for row in rows) for rank in self.rows for rows in rank]
        costs = [sum(_cost(lengths[row], self.cost) for rows in rank for row in rows) for rank in self.rows]
        return {
            "micro_batches": float(max(len(rank) for rank in self.rows)),
            "packing_efficiency": sum(sums) / sum(max(tokens, self.rules.max_tokens) for tokens in sums),
            "imbalance": max(costs) * len(costs) / sum(costs),
        }


def micro_batches(lengths: Mapping[int, int], rules: PackingRules, cost: Cost = TOKENS) -> MicroBatches:
    """The micro-batches of rows with these `lengths` in tokens. A rank for which there is no row has an empty one."""
    rows = list(lengths)
    fill = pack if rules.packing else pack_padded
    ranks = []
    for part in balance([_cost(length, cost) for length in lengths.values()], rules.ranks):
        own = [rows[index] for index in part]
        bins = fill([lengths[row] for row in own], rules.max_tokens)
        ranks.append([[own[index] for index in indices] for indices in bins] or [[]])
    return MicroBatches(rules, cost, ranks)


def _cost(length: int, cost: Cost) -> int:
    return length * (cost[0] + length * cost[1])


def trained_lengths(batch: pa.Table) -> dict[int, int]:
    """Tokens, prompt and response, of every row of an optimizer batch that is not dropped and has a token to train."""
    trained = np.zeros(batch.num_rows, bool)
    trained[pc.list_parent_indices(batch["loss_mask"]).filter(pc.not_equal(pc.list_flatten(batch["loss_mask"]), 0))] = 1
    trained &= pc.fill_null(batch["kept"], True).to_numpy()
    tokens = pc.add(*(pc.list_value_length(batch[name]) for name in ("prompt_token_ids", "response_token_ids")))
    return {row: tokens[row].as_py() for row in np.flatnonzero(trained).tolist()}
