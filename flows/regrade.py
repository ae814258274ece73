"""The flow `regrade`: flows/regrading.py under Prefect, which the command line does without."""

from dataclasses import asdict
from typing import Any

from prefect import flow

from milepost.flows.outcome import recorded
from milepost.flows.regrading import THRESHOLD, regrade_run
from milepost.storage.parameters import RewardSection


@flow(name="regrade", flow_run_name="regrade {run}", retries=0)
@recorded
async def regrade(
    run: str,
    root: str = "runs",
    reward: RewardSection | None = None,
    steps: str = "",
    threshold: float = THRESHOLD,
    max_flips: float | None = None,
) -> dict[str, Any]:
    """Score all stored samples once more, and fail when more than `max_flips` percent are judged otherwise.

    Args:
        run: Name of the run.
        root: Folder of all runs.
        reward: How samples are scored; by the run's own reward, as it is now, when left out.
        steps: Which finished steps, as a:b; all when empty.
        threshold: The score from which a sample counts as right.
        max_flips: Percent of samples that may be judged otherwise; any number when left out.
    """
    found = await regrade_run(run, root, reward=reward, steps=steps, threshold=threshold)
    if max_flips is not None and found.flip_percent > max_flips:
        raise ValueError(f"{found.flip_percent:.2f} % of {found.samples} samples flipped, {max_flips:g} % may")
    return asdict(found)
