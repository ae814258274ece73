"""What every stage of a step is given: the run as it is recorded, its running engines, and where the run stands."""

from dataclasses import dataclass, replace

from pydantic import BaseModel, Field

from milepost.engines.fleet import Fleet, connect_fleet
from milepost.engines.graders import GraderPool
from milepost.engines.protocols import WeightVersion
from milepost.engines.train_actors import TrainActors
from milepost.flows.deadline import Deadlines, longest_stages
from milepost.storage import attempts, manifest, runs
from milepost.storage.batch_plan import BatchPlan, batch_plan
from milepost.storage.carried import INTERRUPTED, round_size
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.parent import course_of
from milepost.storage.prompt_mixture import shares_of
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.stages import Course, Stage
from milepost.storage.tables import TableRef
from milepost.tasks.early_stop import EarlyStop
from milepost.tasks.generate import Shard
from milepost.tasks.sample import PromptOrder
from milepost.tasks.sampling import REFILLS, Sampling, TokenizerFolder, sampling_params
from milepost.tasks.score_ahead import ScoreAhead
from milepost.tasks.staleness import oldest_version
from milepost.tasks.tools import tool_rules


@dataclass(frozen=True)
class Position:
    """Where a run stands before a step: the next prompt, and the weights that trainer and engines hold.

    `fence` is the number of the claim that the run is worked on under; 0 without a lease.
    """

    cursor: Cursor
    version: WeightVersion
    fence: int = 0


class Unshown(BaseModel):
    """Parameters on their way to a step. Prefect shows them with the run, and keeps no copy of them for each step."""

    parameters: Parameters = Field(exclude=True)


@dataclass(frozen=True)
class StepContext:
    """What every stage of a step needs. `taken` are the slots whose tables come from another run."""

    folder: RunFolder
    store: StepStore
    record: RunRecord
    plan: BatchPlan
    order: PromptOrder
    fleet: Fleet
    version: WeightVersion
    deadlines: Deadlines
    taken: tuple[Slot, ...] = ()

    @property
    def parameters(self) -> Parameters:
        return self.record.parameters

    @property
    def course(self) -> Course:
        return course_of(self.record)

    @property
    def trainer(self) -> TrainActors:
        """Of a run that trains."""
        assert self.fleet.trainer is not None
        return self.fleet.trainer

    @property
    def rounds(self) -> int:
        """Rounds of sampling that the step may take; where prompts are taken, those that there are."""
        return self._taken("sample") or self.parameters.filter.max_rounds

    def shards(self, prompts: TableRef, round_: int) -> int:
        return self._taken("generate", round_) or min(self.parameters.rollout.shards, prompts.rows)

    def _taken(self, stage: Stage, round_: int | None = None) -> int:
        return sum(slot.stage == stage and round_ in (None, slot.round) for slot in self.taken)

    @property
    def sampling(self) -> Sampling:
        parameters = self.parameters
        return Sampling(
            function=parameters.rollout.function,
            params=sampling_params(parameters.rollout),
            n_samples_per_prompt=self.plan.n_samples_per_prompt,
            context_length=parameters.model.context_length,
            seed=parameters.data.seed,
            refills=REFILLS if parameters.filter.partial_groups == "refill" else 0,
            partial=parameters.rollout.partial,
            mask_older_tokens=parameters.rollout.mask_older_tokens,
            vocabulary=self.record.vocabulary,
            tools=tool_rules(parameters.rollout),
            tokenizer=TokenizerFolder.of(parameters.model, self.record.model["folder"]),
        )

    @property
    def round_size(self) -> int:
        """Prompts of a round of sampling."""
        return round_size(self.parameters, self.plan.rollout_batch_size)

    def early_stop(self, missing: int) -> EarlyStop | None:
        """What ends a round once `missing` groups are kept; None where every group is generated."""
        if self.round_size <= self.plan.rollout_batch_size or self.course.taken:
            return None
        reward = self.parameters.reward
        graders = GraderPool.connect(self.folder.run_id, workers=reward.workers)
        oldest = self.oldest(Shard(0, 1, 0))  # of shards that are generated here it is the same for all
        return EarlyStop(missing, reward, self.parameters.filter, graders=graders, oldest=oldest)

    def oldest(self, shard: Shard) -> int | None:
        """See `oldest_version`."""
        most = self.parameters.off_policy.max_staleness
        return oldest_version(self.store, shard, version=str(self.version), max_staleness=most)

    def score_ahead(self) -> ScoreAhead | None:
        """What grades the groups of a shard as they are finished; None where this run makes no samples or no scores."""
        if self.course.taken or not (self.course.makes("generate") and self.course.makes("score")):
            return None
        reward = self.parameters.reward
        return ScoreAhead(reward, GraderPool.connect(self.folder.run_id, workers=reward.workers))

    @property
    def goes_on(self) -> bool:
        """Whether there are groups that the step before did not finish; prompts that are taken come as they are."""
        before = self.store.step - 1
        return before >= 0 and not self.course.taken and INTERRUPTED in manifest.load(self.folder, before).accounting


def open_step(
    root: str, run: str, step: int, version: WeightVersion, fence: int = 0, parameters: Parameters | None = None
) -> StepContext:
    """The context of a step, from the run's own record and its running engines.

    `parameters` are those of the record with their secrets, which no record has.
    """
    folder = runs.run_folder(root, run)
    record = attempts.current(folder)
    record = replace(record, parameters=(parameters or record.parameters).resolved(going_on=True))
    return StepContext(
        folder=folder,
        store=StepStore(folder.step(step), run, step, fence),
        record=record,
        plan=batch_plan(record.parameters),
        order=PromptOrder(
            TableRef(**record.data["prompts"]),
            record.parameters.data.seed,
            record.parameters.data.shuffle,
            shares_of(record.data),
        ),
        fleet=connect_fleet(run, record.parameters, course_of(record)),
        version=version,
        deadlines=Deadlines(record.parameters.engines, longest_stages(folder, step)),
    )
