"""Replays that are kept: a run of its own, on fake engines, from any stage of another run."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.lineage import answer
from milepost.flows.replay import replay
from milepost.flows.sample_view import find_sample
from milepost.flows.sql import as_rows, query
from milepost.flows.train import resume
from milepost.storage import manifest, runs
from milepost.storage.ancestry import Ancestry
from milepost.storage.checkpoints import DamagedCheckpoint
from milepost.storage.runs import RunExists, RunFolder
from milepost.storage.verify import verify

from .stored_run import doubled_reward, stored_run

pytestmark = pytest.mark.slow

FILTER = """
from pathlib import Path
from milepost.tasks.filters import Keep
def picky(group):
    if (Path(__file__).parent / "broken").exists() and group[0]["group_id"].startswith("000002"):
        raise RuntimeError("this filter is broken")
    return Keep(True)
"""


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> Iterator[Path]:
    """A root with the run `stored` of three steps."""
    place = tmp_path_factory.mktemp("kept")
    (place / "kept_filter.py").write_text(FILTER)
    with stored_run(place, model_dir, "filter.group=kept_filter:picky", steps=3):
        yield place


def kept(root: Path, into: str, **options: Any) -> tuple[dict[str, Any], RunFolder]:
    found: dict[str, Any] = asyncio.run(replay(run="stored", root=str(root), into=into, **options))
    return found, runs.run_folder(str(root), into)


def stored(root: Path) -> RunFolder:
    return runs.run_folder(str(root), "stored")


def column(folder: RunFolder, statement: str) -> list[Any]:
    return [row[0] for row in as_rows(query([folder], statement))[1]]


@pytest.fixture(scope="module")
def middle(root: Path) -> tuple[dict[str, Any], RunFolder]:
    """Steps 1 and 2, from score on."""
    return kept(root, "middle", steps="1:3")


def test_a_kept_replay_of_an_unchanged_run_is_identical_down_to_the_weights(
    root: Path, middle: tuple[dict[str, Any], RunFolder]
) -> None:
    found, folder = middle
    assert (found["verdict"], len(found["stages"])) == ("identical", 8)
    before, after = manifest.load(stored(root), 2).version_out, manifest.load(folder, 1).version_out
    assert before.split("-")[1] == after.split("-")[1]
    assert find_sample(str(root), "middle", "000002-0-0000-001")["step"] == 1


def test_a_kept_replay_is_a_run_that_verifies_and_replays_alone(
    middle: tuple[dict[str, Any], RunFolder], tmp_path: Path
) -> None:
    shutil.copytree(middle[1].uri, tmp_path / "middle")
    found = verify(runs.run_folder(str(tmp_path), "middle"))
    assert (found.faults, found.steps, found.checkpoints) == ([], 2, 2)
    assert asyncio.run(replay(run="middle", root=str(tmp_path)))["verdict"] == "identical"
    (tmp_path / "middle" / "checkpoints" / "000000" / "fake.json").write_text("{}")
    assert "fake.json has" in verify(runs.run_folder(str(tmp_path), "middle")).faults[0].problem


def test_a_kept_replay_descends_from_the_weights_that_it_began_with(
    root: Path, middle: tuple[dict[str, Any], RunFolder]
) -> None:
    found = answer("checkpoint:middle@2", str(root))
    assert isinstance(found, Ancestry) and isinstance(found.parent, Ancestry) and isinstance(found.source, Ancestry)
    assert (found.parent.run, len(found.parent.steps)) == ("stored", 1)
    assert [step.taken["step"] for step in found.steps] == [1, 2] and len(found.source.steps) == 3


def test_a_kept_replay_of_a_run_that_began_in_the_middle_begins_with_what_that_began_with(
    root: Path, middle: tuple[dict[str, Any], RunFolder]
) -> None:
    found = asyncio.run(replay(run="middle", root=str(root), into="again", steps="0:1"))
    folder = runs.run_folder(str(root), "again")
    assert (found["verdict"], verify(folder).faults) == ("identical", [])
    begun = answer("checkpoint:again@1", str(root))
    assert isinstance(begun, Ancestry) and isinstance(begun.parent, Ancestry)
    assert (begun.parent.run, len(begun.parent.steps)) == ("stored", 1)


def test_a_run_whose_beginning_is_gone_is_not_replayed_from_another(
    middle: tuple[dict[str, Any], RunFolder], tmp_path: Path
) -> None:
    shutil.copytree(middle[1].uri, tmp_path / "middle")
    shutil.rmtree(tmp_path / "middle" / "checkpoints" / "000000")
    with pytest.raises(ValueError, match="000000, which run 'middle' began with, is not whole: restore it"):
        asyncio.run(replay(run="middle", root=str(tmp_path), into="again", steps="0:1"))
    with pytest.raises(DamagedCheckpoint, match="000000' cannot be used: run 'middle' began with it"):
        asyncio.run(replay(run="middle", root=str(tmp_path), steps="0:1"))
    assert not (tmp_path / "again" / "run.json").exists()


def test_a_reward_that_answers_otherwise_makes_the_kept_run_different(root: Path) -> None:
    with doubled_reward(root):
        found, folder = kept(root, "regraded", steps="0:1")
    assert found["verdict"] == "different" and verify(folder).faults == []
    assert max(column(folder, "select reward from rollouts")) == 4.0


def test_other_parameters_make_a_run_of_what_would_have_been(root: Path) -> None:
    found, folder = kept(root, "sparse", first="filter", overrides=("filter.group=nonzero_std",))
    assert found == {"run": "sparse"} and verify(folder).faults == []
    assert 0 < column(folder, "select count(*) from batches")[0] < 48


def test_generating_again_serves_the_stored_prompts_and_trains_nothing(root: Path) -> None:
    overrides = ("rollout.max_new_tokens=2", "data.n_samples_per_prompt=3")
    found, folder = kept(root, "longer", first="generate", steps="1:3", overrides=overrides)
    assert found == {"run": "longer"} and verify(folder).faults == []
    served = column(stored(root), "select prompt_id from prompts where step > 0 order by group_id")
    assert column(folder, "select prompt_id from prompts order by group_id") == served
    lengths = column(folder, "select len(response_token_ids) from rollouts")
    assert len(lengths) == 3 * len(served) and max(lengths) == 2
    assert manifest.load(folder, 1).version_out.startswith("0-")


def test_the_same_model_generates_the_same_again(root: Path) -> None:
    _, folder = kept(root, "same", first="generate", steps="0:1")
    asked = "select response from rollouts where step = 0 order by sample_id"
    assert column(folder, asked) == column(stored(root), asked)


def test_half_a_replay_is_no_whole_run_and_goes_on(root: Path) -> None:
    (root / "broken").touch()
    try:
        with pytest.raises((RuntimeError, ExceptionGroup)):
            kept(root, "half", first="filter")
    finally:
        (root / "broken").unlink()
    folder = runs.run_folder(str(root), "half")
    assert "2 of 3 steps are made: `milepost resume half` goes on" in verify(folder).notes
    with pytest.raises(RunExists, match="'half' already exists"):
        kept(root, "half", first="filter")
    asyncio.run(resume(run="half", root=str(root)))
    found = verify(folder)
    assert (found.faults, found.steps) == ([], 3)
    assert manifest.load(stored(root), 2).version_out == manifest.load(folder, 2).version_out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"into": "stored"}, "run 'stored' already exists"),
        ({"first": "generate"}, "name a new run for them with --into"),
        ({"overrides": ("filter.group=none",)}, "need the name of a new run"),
        ({"into": "new", "first": "filter", "overrides": ("reward.name=exact",)}, "reward.name is 'exact', what"),
        ({"into": "new", "first": "generate", "overrides": ("engines.train=fake",)}, "trains nothing"),
        ({"into": "new", "first": "optimize", "overrides": ("engines.train=none",)}, "no optimize stage"),
        ({"into": "no/name"}, "run name 'no/name' cannot be used"),
    ],
)
def test_what_no_new_run_can_be_is_refused_and_leaves_nothing(
    root: Path, options: dict[str, Any], problem: str
) -> None:
    before = sorted(path.name for path in root.iterdir())
    with pytest.raises((ValueError, RunExists), match=problem):
        asyncio.run(replay(run="stored", root=str(root), **options))
    assert sorted(path.name for path in root.iterdir()) == before
