"""The loop over steps, on engines that are started again when one of them dies."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.runtime import flow_run

from milepost.engines.fleet import Fleet, fleet, is_engine_failure, is_joined, joined_cluster
from milepost.engines.protocols import WeightVersion
from milepost.flows.deadline import stacks_kept
from milepost.flows.failure import first_cause, sentence
from milepost.flows.iteration import Position
from milepost.flows.progress import Advance, progress_bar, say, step_text
from milepost.flows.report import write_report
from milepost.flows.services import running
from milepost.flows.start import Launched
from milepost.flows.supervision import Restarts, supervised
from milepost.flows.tracker import Tracker, open_tracker, tracking_uri
from milepost.flows.view import View
from milepost.storage import files, manifest
from milepost.storage.journal import StepStore
from milepost.tasks.colocate import Turns
from milepost.tasks.evaluate import Accuracy, evaluate_policy
from milepost.tasks.generate import Sampling, sampling_params
from milepost.tasks.recover import check_version, recover_trainer
from milepost.tasks.sync import push_weights


async def recover(launched: Launched, engines: Fleet) -> tuple[int, Position]:
    """The next step and the position before it, with the weights of that position in the trainer and every engine."""
    turns = Turns(launched.parameters.perf.colocate, engines.trainer, engines.engines)
    stands = recover_trainer(launched.folder, engines.trainer, say=say)
    await turns.syncing()
    pushed = await push_weights(
        stands.step,
        launched.parameters.sync,
        folder=launched.folder,
        trainer=engines.trainer,
        engines=list(engines.engines),
        router_url=engines.router_url,
    )
    check_version(stands, pushed.version)
    await turns.generating()
    return stands.step, Position(stands.cursor, pushed.version, launched.fence)


async def evaluate(launched: Launched, version: WeightVersion, router_url: str) -> Accuracy | None:
    """Held-out accuracy of `version`; None when the run has nothing to evaluate on."""
    if launched.eval_prompts is None:
        return None
    parameters = launched.parameters
    rollout = parameters.rollout
    if parameters.eval.max_new_tokens is not None:
        rollout = rollout.model_copy(update={"max_new_tokens": parameters.eval.max_new_tokens})
    folder = files.join(launched.folder.uri, "evals", f"{version.step:06d}")
    return await evaluate_policy(
        launched.eval_prompts,
        Sampling(rollout.function, sampling_params(rollout), 1, parameters.model.context_length, parameters.data.seed),
        rollout,
        parameters.reward,
        weight_version=str(version),
        router_url=router_url,
        store=StepStore(folder, launched.folder.run_id, version.step, launched.fence),
    )


def eval_due(step: int, steps: int, every: int) -> bool:
    """Whether the weights after `step` steps are evaluated: before the first, every `every`, and after the last."""
    return every > 0 and (step in (0, steps) or step % every == 0)


async def run_steps(launched: Launched, engines: Fleet, tracker: Tracker, advance: Advance, restarts: Restarts) -> None:
    """Every step from where the run stands, with evaluation where it is due."""
    begin, position = await recover(launched, engines)
    steps, every = launched.record.steps, launched.parameters.eval.every_steps
    view = View()
    for step in range(begin, steps):
        if eval_due(step, steps, every):
            await evaluate(launched, position.version, engines.router_url)
        begun = time.monotonic()
        position = await view.step(launched.root, launched.folder.run_id, step, position)
        closed = manifest.load(launched.folder, step)
        restarts.refill()
        tracker.step(closed)
        advance(step_text(closed.metrics, time.monotonic() - begun))
    if eval_due(steps, steps, every):
        await evaluate(launched, position.version, engines.router_url)


async def run_engines(launched: Launched, tracker: Tracker, advance: Advance) -> None:
    """The steps, on new engines each time that something other than a rollout engine dies or hangs."""
    restarts = Restarts(launched.parameters.engines.max_restarts)
    while True:
        try:
            with fleet(launched.folder.run_id, launched.parameters, launched.record.model["folder"]) as engines:
                async with stacks_kept(launched):
                    steps = run_steps(launched, engines, tracker, advance, restarts)
                    await supervised(steps, launched, engines, restarts)
            return
        except Exception as error:  # an engine may fail inside any group of shards; everything else is raised on
            cause = first_cause(error)
            if not is_engine_failure(cause):
                raise
            restarts.take(error)
            say(f"{sentence(cause)}; the engines start again")


@contextmanager
def joined_ray() -> Iterator[None]:
    """In the Ray cluster of `up`, or one of this run's own."""
    address = running().ray_address
    if address is None and not is_joined():
        say("no Ray head runs, so this run starts its own")
    with joined_cluster(address):
        yield


async def run_training(launched: Launched) -> None:
    """Start engines, train to the last step, and leave nothing running."""
    uri = tracking_uri(launched.parameters.tracking, root=launched.root, running_url=running().mlflow_url)
    begun = len(manifest.finished_steps(launched.folder))
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(launched, uri=uri, flow_run_id=str(flow_run.id or "")))
        stack.callback(write_report, launched.folder)
        stack.enter_context(joined_ray())
        advance = stack.enter_context(progress_bar(launched.folder.run_id, launched.record.steps, begin=begun))
        await run_engines(launched, tracker, advance)
