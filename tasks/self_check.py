"""What a run holds of itself in its optimize stage: what can only be so if trainer, engine and accounting are sound.

A violation is raised before anything of the step is committed: the run can be resumed, and does the step again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.engines.protocols import UpdateResult
from milepost.storage.batch_plan import BatchPlan
from milepost.storage.parameters import Parameters
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.off_policy import flat, is_trained
from milepost.tasks.update import Update

_PER_TOKEN = (
    *("loss_mask", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "importance_weights"),
    *("values", "returns"),
)
_OFF = "look for what differs between them, or go on without this by check.enabled=false"


class SelfCheckFailed(RuntimeError):
    """Something that holds in a sound run did not; its parameters or its engines are not what they should be."""


@dataclass(frozen=True)
class Noise:
    """How far two passes of the same weights over the same tokens may differ, only by how they were batched.

    `ratio` is of the mean ratio and of mean log-probabilities, `clipped` of the share of clipped tokens.
    """

    ratio: float
    clipped: float


NOISE = {"float32": Noise(1e-4, 0.0), "bfloat16": Noise(0.05, 0.01)}


@dataclass(frozen=True)
class SelfCheck:
    """What is checked of steps that are trained on as `update` says, and how closely."""

    update: Update
    max_logprob_difference: float
    noise: Noise

    @staticmethod
    def of(parameters: Parameters, update: Update) -> "SelfCheck | None":
        """None for a run that checks nothing."""
        if not parameters.check.enabled:
            return None
        return SelfCheck(update, parameters.check.max_logprob_difference, NOISE[parameters.perf.dtype])

    @property
    def recomputes(self) -> bool:
        """Whether old log-probabilities are the trainer's own."""
        return self.update.algorithm.old_logprobs == "recompute"

    def prepared(self, table: pa.Table, version: WeightVersion, *, step: int) -> None:
        """A step's samples with all that the loss needs, before any of them is trained on by weights `version`."""
        require_lengths(table, step=step)
        if self.recomputes and made_by(table, version):
            self._engines_agree(table, version, step=step)
        if self.recomputes and self.update.compares and self.update.reference_is_policy(step):
            self._references_agree(table, step=step)

    def _engines_agree(self, table: pa.Table, version: WeightVersion, *, step: int) -> None:
        found, tokens = difference(table, "old_logprobs", "rollout_logprobs")
        if not found <= self.max_logprob_difference:  # also when it is not a number
            raise SelfCheckFailed(
                f"step {step}: log-probabilities of trainer and rollout engine are {found:.4g} apart in the mean of "
                f"{tokens} tokens, both of weights {version}, and check.max_logprob_difference is "
                f"{self.max_logprob_difference:g}: make temperature, model and dtype of both the same, or raise it"
            )

    def _references_agree(self, table: pa.Table, *, step: int) -> None:
        found, tokens = difference(table, "old_logprobs", "ref_logprobs")
        if not found <= self.noise.ratio:
            raise SelfCheckFailed(
                f"step {step}: log-probabilities of policy and reference are {found:.4g} apart in the mean of {tokens} "
                f"tokens, both of the same weights, and up to {self.noise.ratio:g} is rounding: {_OFF}"
            )

    def first_update(self, result: UpdateResult, *, step: int) -> None:
        """What the first optimizer step of a step said, whose old log-probabilities the weights before it gave."""
        if not self.recomputes or not result.applied:
            return
        ratio, clipped = result.metrics.get("ratio_mean", 1.0), result.metrics.get("pg_clipfrac", 0.0)
        algorithm = self.update.algorithm
        narrow = min(algorithm.clip_low, algorithm.clip_low if algorithm.clip_high is None else algorithm.clip_high)
        allowed = self.noise.clipped if narrow > self.noise.ratio else 1.0
        if not (abs(ratio - 1) <= self.noise.ratio and clipped <= allowed):
            raise SelfCheckFailed(
                f"step {step}: the first optimizer step has a mean ratio of {ratio:.6g} and {clipped:.4g} of its "
                f"tokens clipped, and nothing was trained before it: up to {self.noise.ratio:g} from 1 and "
                f"{allowed:g} is rounding: {_OFF}"
            )


def require_lengths(table: pa.Table, *, step: int) -> None:
    """SelfCheckFailed unless every per-token column, where it is known, has a number for each response token."""
    tokens = pc.list_value_length(table["response_token_ids"])
    for column in _PER_TOKEN:
        wrong = pc.fill_null(pc.not_equal(pc.list_value_length(table[column]), tokens), False)
        row = pc.index(wrong, True).as_py()
        if row >= 0:
            raise SelfCheckFailed(
                f"step {step}: sample {table['sample_id'][row]} has {len(table[column][row])} numbers in {column} for "
                f"{tokens[row]} tokens, and they must be as many: see what fills that column"
            )


def require_plan(table: pa.Table, parts: Sequence[pa.Table], plan: BatchPlan, *, step: int) -> None:
    """SelfCheckFailed unless every sample is in one batch, and the batches of a full step are as large as planned."""
    ids = [sample for part in parts for sample in part["sample_id"].to_pylist()]
    sizes = [part.num_rows for part in parts]
    planned = [plan.global_batch_size] * plan.num_steps_per_rollout
    fits = sizes == planned if len(ids) >= plan.samples_per_step else max(sizes, default=0) <= plan.global_batch_size
    if ids != table["sample_id"].to_pylist() or len(set(ids)) != len(ids) or not fits:
        raise SelfCheckFailed(
            f"step {step}: {table.num_rows} samples are cut into batches of {sizes}, with {len(set(ids))} "
            f"different ones, and the plan is {planned}: see the filtered tables of the step"
        )


def made_by(table: pa.Table, version: WeightVersion) -> bool:
    """Whether every sample is of weights `version` alone, and the engine's log-probabilities are known."""
    steps = [pc.equal(table[name], version.step) for name in ("weight_version_min", "weight_version_max")]
    digest = pc.equal(pc.utf8_slice_codeunits(table["weights_digest"], 0, 16), version.digest[:16])
    known = [pc.fill_null(each, False) for each in (*steps, digest)]
    return not table["rollout_logprobs"].null_count and all(pc.all(each).as_py() for each in known)


def difference(table: pa.Table, one: str, other: str) -> tuple[float, int]:
    """How far two columns of log-probabilities are apart, as the mean of the trained tokens, and how many those are."""
    trained = is_trained(table)
    apart = np.abs(flat(table, one) - flat(table, other))[trained]
    return (float(apart.mean()) if len(apart) else 0.0), len(apart)
