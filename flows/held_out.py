"""Held-out evaluation during training: on the run's engines between two steps, or on a spare one while steps go on.

The scores are the same either way: what is generated depends on weights and prompts alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from milepost.engines.fleet import Fleet, is_engine_failure
from milepost.engines.protocols import WeightSource, WeightVersion
from milepost.engines.stored_weights import StoredWeights
from milepost.flows.failure import first_cause, sentence
from milepost.flows.progress import say
from milepost.flows.results import evaluation_folder
from milepost.flows.start import Launched
from milepost.flows.supervision import Restarts, supervised
from milepost.flows.view import View
from milepost.flows.watching import Watch
from milepost.storage import attempts, files, manifest, retention
from milepost.storage.eval_sets import eval_sets
from milepost.storage.journal import StepStore
from milepost.storage.parameters import EvalSection, SyncSection
from milepost.tasks.eval_scores import SetScore
from milepost.tasks.evaluate import evaluate_set, result_slot, set_plans
from milepost.tasks.held_weights import hold, hold_again, spare_folder
from milepost.tasks.sync import push_weights

PIN = "evaluation"


def eval_due(step: int, steps: int, every: int) -> bool:
    """Whether the weights after `step` steps are evaluated: before the first, every `every`, and after the last."""
    return every > 0 and (step in (0, steps) or step % every == 0)


def _store(launched: Launched, version: WeightVersion) -> StepStore:
    uri = evaluation_folder(launched.folder, version.step)
    return StepStore(uri, launched.folder.run_id, version.step, launched.fence)


async def evaluate(launched: Launched, version: WeightVersion, router_url: str, watch: Watch) -> list[SetScore]:
    """Score `version`, which the engines behind the router hold, on every set, and tell of it."""
    assert launched.eval_prompts is not None
    plans = set_plans(eval_sets(launched.parameters.eval), launched.parameters, launched.record)
    store, prompts = _store(launched, version), launched.eval_prompts
    # No edge leads here from the step before: Prefect's pages cannot show a task that waits for a flow.
    scores = [
        await evaluate_set(prompts, plan, weight_version=str(version), router_url=router_url, store=store)
        for plan in plans
    ]
    watch.tracker.evaluated(version, scores)
    watch.evaluated(version, scores)
    return scores


def _asked(section: EvalSection) -> EvalSection:
    """What decides whether two evaluations are of the same sets."""
    return section.model_copy(update={"every_steps": 0, "spare_engine": False})


def missed(launched: Launched, begin: int) -> list[WeightVersion]:
    """Weights before step `begin` whose evaluation on the sets of today was due, and is not finished."""
    if not launched.parameters.eval.spare_engine or launched.eval_prompts is None:
        return []
    given, steps = attempts.all_parameters(launched.folder), launched.record.steps
    today = _asked(given[launched.record.attempt].eval)
    every = {number: found.eval.every_steps for number, found in given.items() if _asked(found.eval) == today}
    due = [step for step in range(begin) if any(eval_due(step, steps, each) for each in every.values())]
    closed = [manifest.load(launched.folder, step) for step in due]
    wanted = [one for one in closed if eval_due(one.step, steps, every.get(max(one.attempt, 1), 0))]
    versions = {found.step: found for found in (WeightVersion.parse(one.version_in) for one in wanted)}
    return [version for version in versions.values() if not _is_finished(launched, version)]


def _is_finished(launched: Launched, version: WeightVersion) -> bool:
    store, sets = _store(launched, version), eval_sets(launched.parameters.eval)
    return all(store.stored(result_slot(index)) for index in range(len(sets)))


def hold_missed(launched: Launched, engines: Fleet) -> list[WeightVersion]:
    """The weights to be evaluated after all, kept for it: those of a run that was ended during an evaluation.

    For before the trainer is brought to where the run stands.
    """
    folder = launched.folder
    wanted = missed(launched, len(manifest.finished_steps(folder)))
    found = hold_again(folder, wanted, engines.trainer)
    if gone := [str(version.step) for version in wanted if version not in found]:
        say(f"the weights after {', '.join(gone)} steps were not evaluated, and are not kept any more")
    for step in retention.pinned(folder, PIN) - {version.step for version in found}:
        retention.unpin(folder, step, PIN)
    return found


@dataclass(frozen=True)
class _Going:
    """An evaluation on the spare engine."""

    version: WeightVersion
    task: asyncio.Task[None]


class HeldOut:
    """The evaluations of one attempt at a run. At most one is going on beside the steps."""

    def __init__(self, launched: Launched, engines: Fleet, watch: Watch, view: View) -> None:
        self._launched = launched
        self._engines = engines
        self._watch = watch
        self._view = view
        self._spare = engines.spare
        self._going: _Going | None = None

    async def begin(self, version: WeightVersion) -> None:
        """Evaluate `version`, which the run's engines have: to the end, or beside the steps on the spare engine."""
        if self._launched.eval_prompts is None or (self._going and self._going.version == version):
            return
        await self.settle()
        if self._spare is not None:
            await self._start(self._spare, version)
            return
        self._view.keep(await evaluate(self._launched, version, self._engines.router_url, self._watch))
        self._unpin(version)

    async def make_up(self, missed: Sequence[WeightVersion]) -> None:
        """Evaluate weights that no engine but the spare one will hold any more."""
        for version in missed:
            await self.settle()
            if self._spare is not None:
                await self._start(self._spare, version)

    async def _start(self, spare: Fleet, version: WeightVersion) -> None:
        source = await asyncio.to_thread(hold, self._launched.folder, version, self._engines.weights)
        with contextlib.suppress(LookupError):  # not every evaluation has a checkpoint
            retention.pin(self._launched.folder, version.step, PIN, "it is being evaluated")
        self._going = _Going(version, asyncio.create_task(self._beside(spare, source)))

    async def look(self) -> None:
        """Between two steps: settle an evaluation that has ended."""
        if self._going and self._going.task.done():
            await self.settle()

    async def end(self, version: WeightVersion, *, due: bool) -> None:
        """After the last step: evaluate the last weights if that is `due`, and leave nothing going on."""
        if due:
            await self.begin(version)
        if await self.settle() == version:
            await self.begin(version)

    async def settle(self) -> WeightVersion | None:
        """Wait for the evaluation that is going on. Its weights when the spare engine was lost: none is used again."""
        if self._going is None:
            return None
        going, self._going = self._going, None
        if not going.task.done():
            say(f"the weights of step {going.version.step} are still being evaluated: the run waits for it")
        try:
            await going.task
        except Exception as error:  # it may be inside a group; whatever a new engine may not do is raised on
            cause = first_cause(error)
            if not is_engine_failure(cause):
                raise
            self._spare = None
            say(
                f"{sentence(cause)}; the weights of step {going.version.step} are not evaluated, later ones are "
                "between two steps"
            )
            return going.version
        self._unpin(going.version)
        return None

    async def cancel(self) -> None:
        """End what is going on; a later attempt goes on with it."""
        if self._going is not None:
            self._going.task.cancel()
            await asyncio.gather(self._going.task, return_exceptions=True)

    async def _beside(self, spare: Fleet, source: WeightSource) -> None:
        launched = replace(self._launched, folder=spare_folder(self._launched.folder))
        restarts = Restarts(self._launched.parameters.engines.max_restarts)
        await supervised(self._score(spare, source), launched, spare, restarts)
        await asyncio.to_thread(files.remove_folder, source.uri)

    async def _score(self, spare: Fleet, source: WeightSource) -> None:
        await push_weights(
            source.version.step,
            SyncSection(timeout_seconds=self._launched.parameters.sync.timeout_seconds),
            folder=spare_folder(self._launched.folder),
            trainer=StoredWeights(source),
            engines=list(spare.engines),
            router_url=spare.router_url,
        )
        self._view.keep(await evaluate(self._launched, source.version, spare.router_url, self._watch))

    def _unpin(self, version: WeightVersion) -> None:
        """Let the checkpoint go, if it is not the best one: here, between two steps, nothing else needs it."""
        folder, kept = self._launched.folder, self._launched.parameters.checkpoint
        if version.step in retention.pinned(folder, PIN):
            retention.unpin(folder, version.step, PIN)
            retention.retain(folder, keep_last=kept.keep_last, keep_every=kept.keep_every)


@asynccontextmanager
async def held_out(launched: Launched, engines: Fleet, watch: Watch, view: View) -> AsyncIterator[HeldOut]:
    """The evaluations of an attempt; none is going on any more afterwards."""
    found = HeldOut(launched, engines, watch, view)
    try:
        yield found
    finally:
        await found.cancel()
