"""The learning rate as a pure function of the optimizer step, so that a resumed run cannot be at another rate."""

from milepost.storage.training import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection) -> float:
    """The rate of optimizer step `step`, counted from 0.

    `warmup` is `lr * step / warmup_steps` until step `warmup_steps`, then `lr`: linear from zero, as in Megatron, so
    step 0 has rate 0 and only fills Adam's moments.
    """
    if step < 0:
        raise ValueError(f"optimizer step is {step}, steps are counted from 0")
    if optimizer.schedule == "warmup" and step < optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    return optimizer.lr
