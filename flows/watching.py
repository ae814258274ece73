"""What a run looks at between two steps: whether a rule ends it, and what it tells Prefect of."""

import asyncio
from dataclasses import dataclass, field, replace

from milepost.engines.fleet import Fleet
from milepost.engines.gpu_placement import shares_gpus
from milepost.engines.protocols import WeightVersion
from milepost.flows.best import best_checkpoint, metric_name
from milepost.flows.events import checkpoint_saved, metric_crossed
from milepost.flows.progress import say
from milepost.flows.start import Launched
from milepost.flows.stopped import history
from milepost.flows.tracker import Tracker
from milepost.storage import checkpoints, lease, manifest, retention, stops
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import Parameters
from milepost.storage.registry import nearest
from milepost.storage.stops import Stop
from milepost.tasks.colocate import Turns
from milepost.tasks.eval_scores import SetScore
from milepost.tasks.sync import save_checkpoint
from milepost.tasks.watched import Broken, History, broken_rule, crossings, watched_metrics

PIN = "best"


def mark_best(launched: Launched, tracker: Tracker) -> None:
    """Pin the best checkpoint, so that it stays when older ones are removed, and unpin the one before."""
    folder, chosen = launched.folder, launched.parameters.checkpoint
    best = best_checkpoint(folder, chosen, checkpoints.complete(folder, hashes=False))
    before = retention.pinned(folder, PIN)
    if best is None or before == {best.after}:
        return
    name = metric_name(chosen)
    retention.pin(folder, best.after, PIN, f"{name} {best.value:g} is the best so far")
    for version in before - {best.after}:
        retention.unpin(folder, version, PIN)
    tracker.best(best.after, name, best.value)


@dataclass
class Watch:
    """The run of one loop as it comes along. Without rules and alerts, nothing of its past is read."""

    launched: Launched
    tracker: Tracker
    _history: History | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        chosen = self.launched.parameters
        if watched_metrics(chosen) or chosen.stop != type(chosen.stop)():
            self._history = history(self.launched.folder)

    def closed(self, closed: StepManifest) -> None:
        """A step was finished."""
        if closed.checkpoint:
            checkpoint_saved(self.launched, closed)
        if self._history is None:
            return
        if not self._history.steps:
            _tell_of_unknown(self.launched.parameters, closed)
        self._history = replace(self._history, steps=[*self._history.steps, closed])

    def evaluated(self, version: WeightVersion, scores: list[SetScore]) -> None:
        """Weights were evaluated: their checkpoint may be the best one so far."""
        mark_best(self.launched, self.tracker)
        if self._history is not None:
            found = {name: value for score in scores for name, value in score.metrics().items()}
            held_out, late = self._history.held_out, self._history.late
            self._history = replace(
                self._history, held_out={**held_out, version.step: found}, late=late | {version.step}
            )

    def broken(self) -> Broken | None:
        """Tell of what has come to be crossed; why the run is to stop here, None when it goes on."""
        if self._history is None:
            return None
        for crossing in crossings(self.launched.parameters.alert, self._history):
            say(f"alert: {crossing.reason}")
            metric_crossed(self.launched, crossing)
        self._history = replace(self._history, late=frozenset())
        return broken_rule(self.launched.parameters.stop, self._history)


def _tell_of_unknown(parameters: Parameters, closed: StepManifest) -> None:
    """A metric that the first step has not will hardly come."""
    for metric in watched_metrics(parameters):
        if not metric.startswith("eval/") and metric not in closed.metrics:
            hint = nearest(metric, list(closed.metrics))
            say(f"{metric!r} is watched, and step {closed.step} has no such metric{hint}")


async def stop(watch: Watch, engines: Fleet, version: WeightVersion, after: int, why: Broken) -> None:
    """End a run in good order `after` so many steps: with a checkpoint, if it trains, and then a record of why.

    Where engines share the trainer's GPUs, nothing can be generated after this.
    """
    launched, tracker, folder = watch.launched, watch.tracker, watch.launched.folder
    if launched.fence:
        lease.check_fence(folder.uri, launched.fence)
    if engines.trainer is not None:
        await Turns(shares_gpus(launched.parameters), engines.trainer, engines.engines).training()
        await asyncio.to_thread(save_checkpoint, version, folder=folder, trainer=engines.trainer)
    before = manifest.load(folder, after - 1)
    stops.publish(folder, Stop(after, why.rule, why.reason, launched.attempt, engines.trainer is not None))
    closed = manifest.load(folder, after - 1)
    if closed.checkpoint != before.checkpoint:  # and not one that the step itself has saved
        tracker.step(closed)
        checkpoint_saved(launched, closed)
        kept = launched.parameters.checkpoint
        retention.retain(folder, keep_last=kept.keep_last, keep_every=kept.keep_every)
    mark_best(launched, tracker)
    tracker.reason = f"{why.rule}: {why.reason}"
    say(f"run {folder.run_id} stops after {after} of {launched.record.steps} steps: {why.reason} ({why.rule})")
