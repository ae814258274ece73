"""What of off-policy corrections does not go together with the rest of a run, found before anything starts."""

from milepost.storage.parameters import Parameters


def check_off_policy(parameters: Parameters, *, generates: bool) -> None:
    """ValueError for ratios of a thing with itself, and for samples that a run generates on with only to drop them."""
    chosen = parameters.off_policy
    if chosen.weighs and parameters.algorithm.old_logprobs == "rollout":
        on = [name for name in ("weights", "reject", "veto") if getattr(chosen, name) not in ("none", None)]
        raise ValueError(
            f"off_policy.{on[0]} compares the trainer's log-probabilities with the rollout's, and with "
            "algorithm.old_logprobs=rollout they are the same: set that to recompute, or leave it out"
        )
    if generates and chosen.max_staleness == 0 and parameters.rollout.partial:
        raise ValueError(
            "rollout.partial goes on with what older weights began, and off_policy.max_staleness=0 drops all of that: "
            "raise it to 1 or more, or set rollout.partial=false"
        )
