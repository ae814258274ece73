"""What decides what a step makes of its kept samples: the parameters that a run has for it, from every section."""

from collections.abc import Set
from dataclasses import asdict, dataclass
from typing import Any

from milepost.engines.loss_params import LOSSES
from milepost.engines.protocols import VALUE_LOSS, UpdateParams
from milepost.storage.batch_plan import BatchPlan, batch_plan, critic_optimizer
from milepost.storage.off_policy import OffPolicySection
from milepost.storage.parameters import Parameters
from milepost.storage.section import Section
from milepost.storage.training import AlgorithmSection, CriticSection, OptimizerSection, ReferenceSection

# Of the key of an optimize stage since there is one; what came later is in it where it is not as by default.
_ALWAYS = {
    "advantage",
    "loss",
    "normalize_std",
    "clip_low",
    "clip_high",
    "aggregation",
    "old_logprobs",
    "global_batch_size",
    "num_steps_per_rollout",
}

_OF_ALGORITHM = {
    "clip_low",
    "clip_high",
    "dual_clip",
    "tau_positive",
    "tau_negative",
    "aggregation",
    "max_length",
    "kl_estimator",
    "kl_unbiased",
    "entropy_coef",
    "log_entropy",
}
_NEVER = {"max_skipped_steps", "max_staleness"}  # of what decides nothing here
_FROM_ELSEWHERE = ("max_length",)  # loss parameters that other sections may have given


def update_params(parameters: Parameters) -> UpdateParams:
    """The loss of a run's batches, and all that it is called with; see LossParams."""
    algorithm = parameters.algorithm
    params = algorithm.model_dump(mode="json", include=_OF_ALGORITHM)
    params |= {"kl_coef": algorithm.kl_loss_coef, "opsm_delta": parameters.off_policy.opsm_delta}
    if algorithm.aggregation == "constant" and algorithm.max_length is None:
        params["max_length"] = parameters.rollout.max_new_tokens
    for name in algorithm.loss_options:
        if algorithm.loss in LOSSES:
            raise ValueError(
                f"algorithm.loss {algorithm.loss!r} is built in and takes no algorithm.loss_options: leave {name!r} out"
            )
        if name in params:
            raise ValueError(f"algorithm.loss_options has {name!r}, which every loss is given: set it outside of them")
    optimizer = parameters.optimizer.model_dump(mode="json")
    return UpdateParams(algorithm.loss, params | algorithm.loss_options, optimizer)


@dataclass(frozen=True)
class Update:
    """How a step is trained on. `before` counts the steps that the trainer had taken before the first of the run."""

    algorithm: AlgorithmSection
    off_policy: OffPolicySection
    reference: ReferenceSection
    plan: BatchPlan
    loss: UpdateParams
    before: int = 0
    critic: CriticSection | None = None
    critic_optimizer: OptimizerSection | None = None

    @staticmethod
    def of(parameters: Parameters, before: int = 0) -> "Update":
        has_critic = parameters.algorithm.has_critic
        return Update(
            algorithm=parameters.algorithm,
            off_policy=parameters.off_policy,
            reference=parameters.reference,
            plan=batch_plan(parameters),
            loss=update_params(parameters),
            before=before,
            critic=parameters.critic if has_critic else None,
            critic_optimizer=critic_optimizer(parameters) if has_critic else None,
        )

    @property
    def value_loss(self) -> UpdateParams:
        """The critic's loss of a batch, which becomes one number as the policy's does."""
        assert self.critic is not None and self.critic_optimizer is not None
        params = {name: self.loss.params[name] for name in ("aggregation", "max_length")}
        optimizer = self.critic_optimizer.model_dump(mode="json")
        return UpdateParams(VALUE_LOSS, {"value_clip": self.critic.value_clip, **params}, optimizer)

    def trains_policy(self, step: int) -> bool:
        """Whether `step` of the run trains the policy, and not the critic alone."""
        return self.critic is None or self.before + step >= self.critic.pretrain_steps

    @property
    def compares(self) -> bool:
        """Whether the samples are to have log-probabilities of the reference policy."""
        return bool(self.algorithm.kl_loss_coef or self.algorithm.kl_reward_coef or self.reference.path)

    def renews_reference(self, step: int) -> bool:
        """Whether the policy becomes the reference before `step` of the run is trained on."""
        every, taken = self.reference.refresh_every_steps, self.before + step
        return self.compares and every > 0 and taken > 0 and taken % every == 0

    def reference_is_policy(self, step: int) -> bool:
        """Whether the reference has the weights that `step` of the run begins with."""
        return self.renews_reference(step) or (self.before + step == 0 and not self.reference.path)

    def config(self, step: int) -> dict[str, Any]:
        """What of it decides what `step` comes to, for the key of the stage."""
        config = chosen(self.algorithm, _ALWAYS) | asdict(self.plan)
        if weighing := chosen(self.off_policy):
            config["off_policy"] = weighing
        given = {name: self.loss.params.get(name) for name in _FROM_ELSEWHERE}
        config |= {name: value for name, value in given.items() if value is not None}
        if self.compares:
            config["reference"] = {"path": self.reference.path, "renewed": self.renews_reference(step)}
        if self.critic:
            given = {"path": self.critic.path, "value_clip": self.critic.value_clip}
            config["critic"] = given | {"alone": not self.trains_policy(step)}
        return config


def chosen(section: Section, always: Set[str] = frozenset()) -> dict[str, Any]:
    """The fields of a section that decide something and are not as by default, and those of `always`."""
    values, usual = (each.model_dump(mode="json", exclude=_NEVER) for each in (section, type(section)()))
    return {name: value for name, value in values.items() if name in always or value != usual[name]}
