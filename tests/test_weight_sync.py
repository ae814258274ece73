"""The whole DAG with each transport: the same weights reach the engines, whatever way they take."""

from pathlib import Path

import pytest

from milepost.engines.fleet import Fleet
from milepost.flows.iteration import iteration
from milepost.flows.start import Launched, begin_run
from milepost.flows.step_context import Position
from milepost.storage import files, manifest, runs
from milepost.storage.runs import RunFolder
from milepost.tasks.sync import current_weights, push_weights

from .conftest import Prompts
from .e2e.test_train import BASE, trained
from .test_supervision import processes, work_supervised

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

LIVE = ("tensor", "distributed")


@pytest.fixture(scope="module")
def by_disk(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> RunFolder:
    return trained("by-disk", tmp_path_factory.mktemp("disk"), model_dir, "engines.rollout_engines=2")


@pytest.mark.parametrize("transport", ["delta", *LIVE])
def test_a_run_ends_with_the_same_weights_whatever_the_transport(
    by_disk: RunFolder, tmp_path: Path, model_dir: str, transport: str
) -> None:
    chosen = ("engines.rollout_engines=2", f"sync.transport={transport}", "sync.bucket_bytes=30000")
    run = trained(f"by-{transport}", tmp_path, model_dir, *chosen)
    for step in (0, 1):
        ours, theirs = manifest.load(run, step), manifest.load(by_disk, step)
        assert ours.version_out == theirs.version_out
        assert ours.metrics["sync/seconds"] > 0 and ours.metrics["sync/bytes"] > 1000
        assert ours.metrics.get("sync/failed", 0) == 0
    assert not files.exists(run.weights(2)) or transport == "delta"  # nothing was written that nobody asked for


@pytest.fixture
def launched(request: pytest.FixtureRequest, tmp_path: Path, model_dir: str, prompts: Prompts) -> Launched:
    from milepost.flows.recipe import load_recipe

    own = [f"model.path={model_dir}", f"data.path={prompts()}", f"sync.transport={request.param}"]
    chosen, _ = load_recipe(None, [*BASE, *own, "engines.rollout_engines=2"])
    run = f"live-{request.param}-{tmp_path.name[-20:].replace('_', '-')}"
    return begin_run(str(tmp_path), runs.run_folder(str(tmp_path), run), 2, chosen, fence=0)


async def push_past_a_dead_engine(launched: Launched, engines: Fleet, step: int, position: Position) -> None:
    """One engine dies, a push reaches the other, and the one that is started again gets a folder written for it."""
    processes("EmbeddedEngine")[0].kill()
    pushed = await push_weights(
        3,
        launched.parameters.sync,
        folder=launched.folder,
        trainer=engines.trainer,
        engines=list(engines.engines),
        router_url=engines.router_url,
    )
    await iteration(launched.root, launched.folder.run_id, step, Position(position.cursor, pushed.version))
    source = current_weights(launched.folder)
    assert source is not None and source.version.step == 1


@pytest.mark.parametrize("launched", [pytest.param("tensor", marks=pytest.mark.long), "distributed"], indirect=True)
def test_an_engine_that_is_started_again_catches_up_with_weights_that_were_sent_live(launched: Launched) -> None:
    work_supervised(launched, push_past_a_dead_engine)
