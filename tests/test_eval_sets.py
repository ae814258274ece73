"""The data sets of an evaluation, as parameters name them."""

import pytest

from milepost.storage.eval_sets import eval_sets, passes, temperature
from milepost.storage.parameters import EvalSection, EvalSet


def test_the_set_of_the_path_comes_first_and_sets_are_called_as_their_files() -> None:
    section = EvalSection(
        path="a/held-out.jsonl@[0:5]", k=[1], sets=[EvalSet(path="b.parquet"), EvalSet(path="c", name="x")]
    )
    assert [item.name for item in eval_sets(section)] == ["held-out", "b", "x"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"path": "held.jsonl"}, "a/held.jsonl and held.jsonl are both called 'held'"),
        (
            {"path": "b.jsonl", "n_samples_per_prompt": 4, "k": [8]},
            "pass@8 of 'b' needs 8 samples a prompt and there are 4",
        ),
        (
            {"path": "b.jsonl", "n_samples_per_prompt": 2, "temperature": 0},
            "2 samples of 'b' at temperature 0 are all the same",
        ),
        ({"path": "b.jsonl", "name": "a b"}, "data set name 'a b' cannot be used"),
        ({"path": "we/ird=b.jsonl"}, "data set name 'ird=b', which is that of its file 'we/ird=b.jsonl', cannot"),
        ({"path": "", "name": "empty"}, "data set 'empty' has no file: give its path"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        eval_sets(EvalSection(path="a/held.jsonl", sets=[EvalSet.model_validate(values)]))


def test_one_sample_is_greedy_and_several_are_drawn_unless_told() -> None:
    assert [temperature(EvalSet(path="a", n_samples_per_prompt=n)) for n in (1, 2)] == [0.0, 1.0]
    assert temperature(EvalSet(path="a", temperature=0.6)) == 0.6


def test_pass_at_k_is_of_powers_of_two_unless_told() -> None:
    assert passes(EvalSet(path="a", n_samples_per_prompt=6)) == [1, 2, 4]
    assert passes(EvalSet(path="a", n_samples_per_prompt=6, k=[6, 3, 3])) == [3, 6]
