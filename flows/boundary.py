"""Changes that a run may make only where a checkpoint stands: batches since would come to other weights than they did.

The optimizer is none of them: every batch is applied again under the section that it was applied under.
"""

from milepost.storage import attempts
from milepost.storage.parameters import Parameters
from milepost.storage.parent import course_of
from milepost.storage.runs import RunFolder, RunRecord
from milepost.tasks.recover import standing, unsaved_steps

# What of a step's arithmetic is the trainer's alone, down to the order in which it adds.
_ARITHMETIC = {
    *("model.tensor_parallel", "model.pipeline_parallel", "model.context_parallel", "model.data_parallel"),
    *("model.sequence_parallel", "perf.max_tokens_per_micro_batch", "perf.dtype", "perf.packing", "perf.balance"),
    *("perf.compile", "perf.train_threads", "rollout.temperature", "critic.path"),
}


def require_checkpoint(folder: RunFolder, before: RunRecord, chosen: Parameters) -> None:
    """ValueError for such a change of a run that has to apply batches again, with what can be done."""
    found = [key for key in attempts.changes(before.parameters, chosen) if key in _ARITHMETIC]
    steps = unsaved_steps(folder) if found and course_of(before).trains else range(0)
    if steps:
        raise ValueError(
            f"{found[0]} cannot change yet: what was trained since step {steps.start} has no checkpoint and would come "
            f"to other weights: give `milepost resume {folder.run_id} --steps {standing(folder).step + 1}`, which ends "
            "with one, and change it then"
        )
