"""What a run does between two steps for others: the evaluations that it was asked for, on its own engines."""

import asyncio
from functools import partial

from milepost.engines.fleet import Fleet, is_engine_failure
from milepost.engines.protocols import WeightVersion
from milepost.flows.checkpoint import Weights
from milepost.flows.evaluation import open_evaluation, run_evaluation, score_all
from milepost.flows.evaluation_request import EvaluationPlan
from milepost.flows.failure import first_cause, sentence
from milepost.flows.progress import say
from milepost.flows.start import Launched
from milepost.flows.view import View
from milepost.storage import asked, runs
from milepost.storage.lease import hold
from milepost.storage.tables import read_table


async def answer(launched: Launched, engines: Fleet, version: WeightVersion, view: View) -> None:
    """Make every evaluation that the run is asked for, of `version`, which its engines hold.

    One that cannot be made is refused: it is no reason to end the run, unless engines died of it.
    """
    for run in await asyncio.to_thread(asked.asked, launched.folder):
        say(f"evaluation {run} was asked for, and is made of the weights after {version.step} steps")
        try:
            await _make(run, launched, engines, version, view)
        except Exception as error:  # whatever it is, it is told to who asked
            asked.settle(launched.folder, run, sentence(error))
            say(f"evaluation {run} cannot be made: {sentence(error)}")
            if is_engine_failure(first_cause(error)):
                raise
        else:
            asked.settle(launched.folder, run)


async def _make(run: str, launched: Launched, engines: Fleet, version: WeightVersion, view: View) -> None:
    one = await asyncio.to_thread(asked.read, launched.folder, run)
    folder, model = runs.run_folder(launched.root, run), launched.record.model
    label = f"{launched.folder.run_id}@{version.step}"
    weights = Weights(label, str(model["folder"]), launched.folder, version if version.step else None)
    prompts = await asyncio.to_thread(read_table, one.prompts)
    plan = EvaluationPlan(run, launched.root, weights, one.parameters, model["config"], prompts)
    with hold(folder) as lease:
        evaluation = await asyncio.to_thread(open_evaluation, plan, folder, fence=lease.fence)
        scoring = partial(score_all, evaluation, engines, version, graders=launched.folder.run_id)
        view.keep(await run_evaluation(evaluation, scoring))
