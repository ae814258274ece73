"""The learning rate as a pure function of the optimizer step, so that a resumed run cannot be at another rate.

Every value is that of Megatron's scheduler: warm-up first, then the schedule down to `min_lr` at `decay_steps`.
"""

import math

from milepost.storage.batch_plan import critic_optimizer
from milepost.storage.parameters import Parameters
from milepost.storage.training import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection) -> float:
    """The rate of optimizer step `step`, counted from 0: with warm-up from zero that one only fills Adam's moments."""
    if step < 0:
        raise ValueError(f"optimizer step is {step}, steps are counted from 0")
    peak, lowest, warmup = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps
    if step < warmup:
        return optimizer.init_lr + (peak - optimizer.init_lr) * step / warmup
    if optimizer.schedule == "constant":
        return peak
    end = _end(optimizer)
    if step > end:
        return lowest
    if optimizer.schedule == "inverse_sqrt":
        return max(lowest, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    return lowest + (peak - lowest) * _share(step, end, optimizer)


def _end(optimizer: OptimizerSection) -> int:
    if optimizer.decay_steps is None:
        raise ValueError(f"optimizer.schedule {optimizer.schedule!r} has no end: set optimizer.decay_steps")
    return optimizer.decay_steps


def _share(step: int, end: int, optimizer: OptimizerSection) -> float:
    """How much of the way from `min_lr` to the peak is left."""
    is_wsd = optimizer.schedule == "wsd"
    style = optimizer.wsd_style if is_wsd else optimizer.schedule
    begin = end - (optimizer.wsd_decay_steps or 0) if is_wsd else optimizer.warmup_steps
    if step <= begin:
        return 1.0
    done = (step - begin) / (end - begin)
    match style:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "exponential":
            return float(2.0 * 0.5**done - 1.0)
        case _:  # minus_sqrt
            return 1.0 - math.sqrt(done)


def check_schedule(optimizer: OptimizerSection, section: str = "optimizer") -> None:
    """ValueError for rates that do not rise and fall, and for a decay that has no room. `section` has the warm-up."""
    for name in ("init_lr", "min_lr"):
        if (low := getattr(optimizer, name)) > optimizer.lr:
            raise ValueError(f"optimizer.{name} {low:g} is more than optimizer.lr {optimizer.lr:g}: lower it")
    if optimizer.schedule == "constant":
        return
    end, decay = _end(optimizer), optimizer.wsd_decay_steps
    if optimizer.warmup_steps >= end:
        raise ValueError(
            f"{section}.warmup_steps {optimizer.warmup_steps} leaves nothing to decay: {optimizer.schedule!r} ends at "
            f"optimizer step {end}, so take fewer or set optimizer.decay_steps"
        )
    if optimizer.schedule != "wsd":
        return
    if decay is None:
        raise ValueError("optimizer.schedule 'wsd' needs optimizer.wsd_decay_steps: say how long its decay is")
    if decay > end - optimizer.warmup_steps:
        raise ValueError(
            f"optimizer.wsd_decay_steps {decay} do not fit: {end - optimizer.warmup_steps} optimizer steps are left "
            f"after warm-up, until optimizer.decay_steps {end}"
        )


def check_rates(parameters: Parameters) -> None:
    """ValueError for a schedule of the policy, or of its critic if it has one, that cannot be kept to."""
    check_schedule(parameters.optimizer)
    if parameters.algorithm.has_critic:
        check_schedule(critic_optimizer(parameters), "critic")


def after_the_end(optimizer: OptimizerSection, optimizer_steps: int) -> str:
    """What to say of a run whose learning rate has come to its end before the run does; else nothing."""
    if optimizer.schedule == "constant" or optimizer_steps <= _end(optimizer):
        return ""
    return (
        f"the learning rate ends at optimizer step {_end(optimizer)}, and those after it, up to {optimizer_steps}, are "
        f"taken at optimizer.min_lr {optimizer.min_lr:g}; --set optimizer.decay_steps=... --allow-change "
        "optimizer.decay_steps ends it later"
    )


def shown(optimizer: OptimizerSection) -> str:
    """The schedule in words."""
    rise = f"{optimizer.init_lr:g} to {optimizer.lr:g} in {optimizer.warmup_steps} optimizer steps, then "
    begin = rise if optimizer.warmup_steps else f"{optimizer.lr:g}, "
    if optimizer.schedule == "constant":
        return f"{begin}constant"
    decay = f" with the last {optimizer.wsd_decay_steps} for its decay" if optimizer.schedule == "wsd" else ""
    return f"{begin}{optimizer.schedule}{decay} until {_end(optimizer)}, then {optimizer.min_lr:g}"
