"""Which finished steps of a run a command is about, and whether it has any."""

from milepost.storage import attempts
from milepost.storage.evaluated import evaluated
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.taught import require_other


def require_steps(folder: RunFolder) -> RunRecord:
    """A run as it was left; ValueError for one that has no steps to run again or to train on."""
    record = attempts.current(folder)
    require_other(folder.run_id, record)
    if of := evaluated(record):
        raise ValueError(
            f"{folder.run_id!r} is an evaluation of {of.label} and has no steps to run again or to train on: "
            f"`milepost regrade {folder.run_id}` scores its samples once more, `milepost evaluate` makes new ones"
        )
    return record


def step_range(text: str, finished: int) -> range:
    """`a:b`, `a:`, `:b` or one number as steps of a run with `finished` ones; ValueError for what is not among them."""
    begin, colon, end = text.partition(":")
    try:
        first = int(begin or 0)
        last = int(end or finished) if colon or not text else first + 1
    except ValueError:
        raise ValueError(f"--steps {text!r} is no range: give a:b, such as 0:5, or one step") from None
    if not finished:
        raise ValueError("the run has finished no step yet")
    if not 0 <= first < last <= finished:
        raise ValueError(f"--steps {text!r} names no finished steps: the run has steps 0 to {finished - 1}")
    return range(first, last)
