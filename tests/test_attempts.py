"""What a resumed run may change, and that nothing of how it began is lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from milepost.flows.parents import going_on
from milepost.storage import attempts, runs
from milepost.storage.batch_plan import with_decay_steps
from milepost.storage.parameters import CheckpointSection, DataSection, Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.training import AlgorithmSection, OptimizerSection

from .test_runs import record


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = runs.run_folder(str(tmp_path), "first")
    runs.create(found, record())
    return found


def parameters(**sections: object) -> Parameters:
    return Parameters(data=DataSection(rollout_batch_size=2)).model_copy(update=sections)


def test_a_run_that_was_not_resumed_is_as_it_began(folder: RunFolder) -> None:
    assert attempts.current(folder) == runs.load(folder)


def test_steps_and_free_sections_may_change(folder: RunFolder) -> None:
    changed = parameters(checkpoint=CheckpointSection(every_steps=5))
    attempt = attempts.begin(folder, changed, steps=9)
    assert attempt.number == 2
    assert attempt.changes == {"checkpoint.every_steps": [0, 5], "steps": [3, 9]}
    now = attempts.current(folder)
    assert (now.steps, now.parameters) == (9, changed)
    assert runs.load(folder) == record()


def test_another_learning_rate_is_refused_with_both_values_and_records_nothing(folder: RunFolder) -> None:
    changed = parameters(optimizer=OptimizerSection(lr=2e-6))
    with pytest.raises(ValueError, match=r"optimizer\.lr was 1e-06 .* is 2e-06 now: .*--allow-change optimizer\.lr"):
        attempts.begin(folder, changed, steps=3)
    assert attempts.attempts(folder) == []


def test_a_run_that_is_given_more_steps_keeps_the_end_of_its_learning_rate() -> None:
    knobs = AlgorithmSection(global_batch_size=4, num_steps_per_rollout=2)
    sections = {"data": DataSection(rollout_batch_size=2), "algorithm": knobs}
    given = parameters(**sections, optimizer=OptimizerSection(schedule="cosine"))
    begun = replace(record(), parameters=with_decay_steps(given, 3))
    assert begun.parameters.optimizer.decay_steps == 6
    assert attempts.changes(begun.parameters, going_on(given, replace(begun, steps=9))) == {}
    constant = replace(record(), parameters=parameters(**sections), steps=9)
    assert going_on(given, constant).optimizer.decay_steps == 18


def test_a_change_that_is_allowed_is_recorded(folder: RunFolder) -> None:
    changed = parameters(optimizer=OptimizerSection(lr=2e-6))
    attempt = attempts.begin(folder, changed, steps=3, allowed=["optimizer.lr"])
    assert attempt.changes == {"optimizer.lr": [1e-6, 2e-6]}
    assert attempts.current(folder).parameters.optimizer.lr == 2e-6


def test_a_second_resumption_is_compared_with_the_first(folder: RunFolder) -> None:
    changed = parameters(optimizer=OptimizerSection(lr=2e-6))
    attempts.begin(folder, changed, steps=3, allowed=["optimizer.lr"])
    again = attempts.begin(folder, changed, steps=3)
    assert (again.number, again.changes) == (3, {})
