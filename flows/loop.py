"""The loop over steps, on engines that are started again when one of them dies."""

import time
from contextlib import ExitStack

from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from milepost.engines.fleet import Fleet, fleet
from milepost.engines.gpu_placement import shares_gpus
from milepost.flows.asked import answer
from milepost.flows.deadline import stacks_kept
from milepost.flows.held_out import eval_due, held_out, hold_missed
from milepost.flows.other_models import other_models
from milepost.flows.progress import Advance, progress_bar, say, step_text
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.report_delivery import report_at_end
from milepost.flows.run_page import shown
from milepost.flows.services import running
from milepost.flows.start import Launched
from milepost.flows.step_context import Position
from milepost.flows.supervision import Restarts, on_new_engines, supervised
from milepost.flows.tracker import Tracker, open_tracker, tracking_uri
from milepost.flows.view import View
from milepost.flows.watching import Watch, stop
from milepost.storage import manifest
from milepost.storage.parent import course_of
from milepost.tasks.colocate import Turns
from milepost.tasks.recover import begin_as_parent, check_version, recover_trainer, standing
from milepost.tasks.sync import push_weights, sync_section


async def recover(launched: Launched, engines: Fleet) -> tuple[int, Position]:
    """The next step and the position before it, with the weights of that position in the trainer and every engine."""
    turns = Turns(shares_gpus(launched.parameters), engines.trainer, engines.engines)
    if engines.trainer:
        stands = recover_trainer(launched.folder, engines.trainer, say=say)
    else:
        stands = standing(launched.folder)
    await turns.syncing()
    pushed = await push_weights(
        stands.version.step if stands.version else 0,
        sync_section(launched.parameters),
        folder=launched.folder,
        trainer=engines.weights,
        engines=list(engines.engines),
        router_url=engines.router_url,
    )
    check_version(stands, pushed.version)
    await turns.generating()
    return stands.step, Position(stands.cursor, pushed.version, launched.fence)


async def run_steps(launched: Launched, engines: Fleet, tracker: Tracker, advance: Advance, restarts: Restarts) -> None:
    """Every step from where the run stands, with evaluation where it is due."""
    if engines.trainer:
        begin_as_parent(launched.folder, launched.record, engines.trainer)
    missed = hold_missed(launched, engines)
    begin, position = await recover(launched, engines)
    steps, every = launched.record.steps, launched.parameters.eval.every_steps
    view, watch = View(), Watch(launched, tracker)
    async with held_out(launched, engines, watch, view) as evaluations:
        await evaluations.make_up(missed)
        for step in range(begin, steps):
            await evaluations.look()
            if eval_due(step, steps, every):
                await evaluations.begin(position.version)
            await answer(launched, engines, position.version, view)
            if why := watch.broken():
                await evaluations.end(position.version, due=every > 0)
                await stop(watch, engines, position.version, step, why)
                return
            begun = time.monotonic()
            # As given, not resolved: the step does that itself, and what is shown of it has no secrets.
            position = await view.step(
                launched.root, launched.folder.run_id, step, position, launched.record.parameters
            )
            view.keep(position)
            closed = manifest.load(launched.folder, step)
            restarts.refill()
            tracker.step(closed)
            watch.closed(closed)
            advance(step_text(closed.metrics, time.monotonic() - begun))
        await evaluations.end(position.version, due=every > 0)
        await answer(launched, engines, position.version, view)
    watch.broken()  # for its alerts: the last step is followed by none


async def run_engines(launched: Launched, tracker: Tracker, advance: Advance) -> None:
    """The steps, on new engines each time that something other than a rollout engine dies or hangs."""
    restarts = Restarts(launched.parameters.engines.max_restarts)
    model_dir, course = launched.record.model["folder"], course_of(launched.record)
    others = other_models(launched.parameters, launched.record.model) if course.trains else {}

    async def attempt() -> None:
        run, parameters = launched.folder.run_id, launched.parameters
        say(f"engines of {run} start: {parameters.engines.train} trains, {parameters.engines.rollout} generates")
        with fleet(run, parameters, model_dir, others=others, course=course) as engines:
            async with stacks_kept(launched):
                steps = run_steps(launched, engines, tracker, advance, restarts)
                await supervised(steps, launched, engines, restarts)

    await on_new_engines(attempt, restarts)


def _page() -> str:
    """Where the flow run is shown, by a server that has pages."""
    api, served = str(PREFECT_API_URL.value() or ""), running().prefect_url
    return f", on {flow_run.ui_url}" if api == served else ""


async def run_training(launched: Launched) -> None:
    """Start engines, train to the last step, and leave nothing running."""
    uri = tracking_uri(launched.parameters.tracking, root=launched.root, running_url=running().mlflow_url)
    begun = len(manifest.finished_steps(launched.folder))
    say(f"run {launched.folder.run_id}: steps {begun} to {launched.record.steps}, into {launched.folder.uri}{_page()}")
    with ExitStack() as stack:
        shown_as = str(flow_run.id or "")
        tracker = stack.enter_context(open_tracker(launched, uri=uri, flow_run_id=shown_as))
        stack.callback(report_at_end, launched.folder, tracker, shown_as)
        stack.enter_context(shown(launched.folder, launched.root, steps=launched.record.steps, flow_run_id=shown_as))
        stack.enter_context(joined_ray())
        advance = stack.enter_context(progress_bar(launched.folder.run_id, launched.record.steps, begin=begun))
        await run_engines(launched, tracker, advance)
