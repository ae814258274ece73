"""A run for tests of what is stored: on fake engines, and scored by a file that a test may change."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from milepost.storage.runs import RunFolder

from .sums import write_sums
from .test_train_fake import parameters, trained

REWARD = """
def length(sample):
    return {factor} * float(len(sample.response) % 3)
"""


@contextmanager
def stored_run(root: Path, model_dir: str, *overrides: str, steps: int) -> Iterator[RunFolder]:
    """The run `stored` in `root`, whose modules can be imported meanwhile.

    Every two steps it has a checkpoint and a new reference.
    """
    compared = ["algorithm.kl_loss_coef=0.1", "reference.refresh_every_steps=2"]
    own = ["checkpoint.every_steps=2", "reward.name=own_reward:length", *compared, *overrides]
    _write_reward(root, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        prompts = write_sums(root / "prompts.jsonl", range(40))
        yield trained("stored", root, parameters(model_dir, prompts, *own), steps=steps)


@contextmanager
def doubled_reward(root: Path) -> Iterator[None]:
    """Within the block the reward of the run in `root` says twice what it said."""
    _write_reward(root, 2)
    try:
        yield
    finally:
        _write_reward(root, 1)


def _write_reward(root: Path, factor: int) -> None:
    (root / "own_reward.py").write_text(REWARD.format(factor=factor))
