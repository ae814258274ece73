"""The engines of an evaluation that has some of its own: started for it, with the weights that it is of."""

import asyncio

from prefect.runtime import flow_run

from milepost.engines.fleet import Fleet, fleet
from milepost.engines.protocols import WeightSource, WeightVersion
from milepost.engines.stored_weights import StoredWeights, model_folder_weights
from milepost.flows.checkpoint import Weights
from milepost.flows.checkpoint_weights import exported_weights
from milepost.flows.claim import queued
from milepost.flows.engine_slots import engine_slots
from milepost.flows.evaluation import score_all, shard_count, shards_scored
from milepost.flows.evaluation_request import COURSE
from milepost.flows.progress import progress_bar, say
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.run_logs import logged
from milepost.flows.start import Launched
from milepost.flows.supervision import Restarts, on_new_engines, supervised
from milepost.tasks.sync import push_weights


async def on_own_engines(launched: Launched, weights: Weights) -> None:
    """The sets, on new engines each time that something other than a rollout engine dies or hangs."""
    with logged(launched.folder, str(flow_run.id or "")), joined_ray():
        # Before there are slots to hold: it may need some for itself.
        source = await exported_weights(weights, launched.folder.run_id)
        async with engine_slots(launched.parameters, queued(launched.folder, launched.fence)):
            await _on_engines(launched, weights, source)


async def _on_engines(launched: Launched, weights: Weights, source: WeightSource | None) -> None:
    restarts = Restarts(launched.parameters.engines.max_restarts)

    async def attempt() -> None:
        rollout, sets = launched.parameters.engines.rollout, len(launched.parameters.eval.sets)
        say(f"engines of {launched.folder.run_id} start: {rollout} generates, for {sets} data sets of {weights.label}")
        with fleet(launched.folder.run_id, launched.parameters, weights.model_dir, course=COURSE) as engines:
            version = await hand_out(weights, source, launched, engines)
            count, begin = shard_count(launched), shards_scored(launched)
            with progress_bar(launched.folder.run_id, count, begin=begin) as advance:
                scoring = score_all(launched, engines, version, advance=advance)
                await supervised(scoring, launched, engines, restarts)

    await on_new_engines(attempt, restarts)


async def hand_out(weights: Weights, source: WeightSource | None, launched: Launched, engines: Fleet) -> WeightVersion:
    """The version of the weights that every engine holds, after loading `source` if there is one."""
    held = await asyncio.to_thread(engines.engines[0].weight_version)
    if source is None and held is not None and not launched.parameters.engines.sglang_urls:
        return held
    # A server that runs already has whatever its last user loaded.
    found: WeightSource = source or await asyncio.to_thread(model_folder_weights, weights.model_dir)
    pushed = await push_weights(
        found.version.step,
        launched.parameters.sync,
        folder=launched.folder,
        trainer=StoredWeights(found),
        engines=list(engines.engines),
        router_url=engines.router_url,
    )
    return pushed.version
