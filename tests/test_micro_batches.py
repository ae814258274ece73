"""Micro-batches hold every trained sample once, in every layout, and are what `verify` works out again."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.micro_batches import (
    TOKENS,
    MicroBatches,
    PackingRules,
    micro_batches,
    packing_rules,
    trained_lengths,
)
from milepost.storage.parameters import ModelSection
from milepost.storage.training import PerfSection
from milepost.storage.verify_micro_batches import check_micro_batches
from milepost.storage.verify_tables import Stack

lengths_by_row = st.dictionaries(st.integers(0, 200), st.integers(2, 50), min_size=1, max_size=60)
layouts = st.builds(
    PackingRules, st.integers(1, 8), st.integers(1, 120), st.booleans(), st.sampled_from(["tokens", "flops"])
)
costs = st.tuples(st.integers(1, 1000), st.integers(0, 10))


def rules(ranks: int, max_tokens: int, *, packing: bool = True) -> PackingRules:
    return PackingRules(ranks, max_tokens, packing, "tokens")


def batch(*samples: tuple[list[int], bool | None]) -> pa.Table:
    """Of each sample its loss mask and whether it was kept; prompts have two tokens."""
    masks, kept = zip(*samples, strict=True)
    return pa.table(
        {
            "prompt_token_ids": [[1, 2]] * len(masks),
            "response_token_ids": [[3] * len(mask) for mask in masks],
            "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
            "kept": pa.array(kept, pa.bool_()),
        }
    )


@given(lengths_by_row, layouts, costs)
def test_every_sample_is_trained_once_in_every_layout(
    lengths: dict[int, int], layout: PackingRules, cost: tuple[int, int]
) -> None:
    cut = micro_batches(lengths, layout, cost)
    assert sorted(row for rank in cut.rows for rows in rank for row in rows) == sorted(lengths)
    assert len(cut.rows) == layout.ranks and all(cut.rows)
    for rows in (rows for rank in cut.rows for rows in rank if len(rows) > 1):
        held = [lengths[row] for row in rows]
        assert (sum(held) if layout.packing else len(held) * max(held)) <= layout.max_tokens
    assert MicroBatches.parse(cut.to_json()) == cut == micro_batches(lengths, layout, cost)


@given(lengths_by_row, layouts, costs)
def test_ranks_differ_by_at_most_the_dearest_sample(
    lengths: dict[int, int], layout: PackingRules, cost: tuple[int, int]
) -> None:
    dear = {row: cost[0] * length + cost[1] * length**2 for row, length in lengths.items()}
    shares = [sum(dear[row] for rows in rank for row in rows) for rank in micro_batches(lengths, layout, cost).rows]
    assert max(shares) - min(shares) <= max(dear.values())


def test_packed_micro_batches_are_filled_by_the_sum_of_tokens_and_padded_ones_by_the_longest() -> None:
    lengths = {0: 60, 1: 20, 2: 20}
    cut = [micro_batches(lengths, rules(1, 100, packing=packing)).rows for packing in (True, False)]
    assert cut == [[[[0, 1, 2]]], [[[0], [1, 2]]]]


def test_balance_by_work_gives_a_long_sample_fewer_companions() -> None:
    lengths = dict(enumerate([40, 20, 20, 10, 10]))
    assert micro_batches(lengths, rules(2, 100)).rows == [[[0, 3]], [[1, 2, 4]]]
    assert micro_batches(lengths, rules(2, 100), (1, 1)).rows == [[[0]], [[1, 2, 3, 4]]]


def test_the_numbers_of_micro_batches_by_hand() -> None:
    lengths = {0: 60, 3: 30, 5: 50, 9: 120}
    cut = micro_batches(lengths, rules(2, 100))
    assert cut.rows == [[[0, 3], [5]], [[9]]]
    # The second rank's only sample is over the budget, and fills it.
    assert cut.metrics(lengths) == {"micro_batches": 2, "packing_efficiency": 260 / 320, "imbalance": 140 / 130}
    assert cut.to_json()["rows"] == [["0 3", "5"], ["9"]]


def test_what_has_no_token_to_train_is_in_no_micro_batch() -> None:
    table = batch(([1, 0], True), ([0, 0], True), ([], None), ([1], False), ([0, 0, 1], None))
    assert trained_lengths(table) == {0: 4, 4: 5}
    assert trained_lengths(pa.concat_tables([table, table]).slice(4, 2)) == {0: 5, 1: 4}


def test_the_rules_are_those_of_the_sections() -> None:
    found = packing_rules(ModelSection(data_parallel=4), PerfSection(max_tokens_per_micro_batch=64, balance="flops"))
    assert found == PackingRules(4, 64, True, "flops")


STORED = rules(1, 12)
TABLE = batch(([1] * 4, True), ([0], True), ([1] * 4, True), ([1] * 6, True))  # 6, 3, 6 and 8 tokens


def faults(rows: list[list[list[int]]] | None, *, given: PackingRules = STORED, **metrics: float) -> list[str]:
    """What is said of the table above when it was cut so, or as it should be, under the rules above."""
    lengths = trained_lengths(TABLE)
    cut = micro_batches(lengths, STORED) if rows is None else MicroBatches(STORED, TOKENS, rows)
    result = {"micro_batches": cut.to_json(), "metrics": micro_batches(lengths, STORED).metrics(lengths) | metrics}
    stored = Stack(TABLE, [("batch", TABLE.num_rows)])
    return [fault.problem for fault in check_micro_batches({"results": [result]}, stored, given, "commit")]


def test_stored_micro_batches_that_are_right_are_no_fault() -> None:
    assert faults(None) == []
    assert check_micro_batches({"results": [{"metrics": {}}]}, Stack(TABLE, [("batch", 4)]), STORED, "commit") == []


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[[3], [0]]], "lack row 2"),
        ([[[3], [0, 2], [0]]], "have row 0 2 times"),
        ([[[3, 1], [0, 2]]], "have row 1, which has no token to train"),
        ([[[3, 0], [2]]], "hold 14 tokens, 12 is the budget"),
        ([[[3], [0], [2]]], "are not those that the lengths of its samples give"),
    ],
)
def test_stored_micro_batches_that_are_wrong_are_told_by_row(rows: list[list[list[int]]], problem: str) -> None:
    assert faults(rows) == [f"micro-batches of batch 0 {problem}"]


def test_stored_rules_and_numbers_must_be_those_of_the_run() -> None:
    (problem,) = faults(None, given=rules(2, 12))
    assert "keep to {'ranks': 1, " in problem and "the parameters give {'ranks': 2, " in problem
    assert faults(None, imbalance=1.5) == ["micro-batches of batch 0 give imbalance 1, 1.5 is stored"]
