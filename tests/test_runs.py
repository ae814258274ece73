"""The run folder and its record."""

from pathlib import Path

import pytest

from milepost.storage import files, manifest, runs
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import DataSection, Parameters
from milepost.storage.provenance import installed_packages, provenance
from milepost.storage.runs import RunRecord


def record(run: str = "first") -> RunRecord:
    parameters = Parameters(data=DataSection(rollout_batch_size=2))
    return RunRecord(run, 3, parameters, runs.parameters_digest(parameters), provenance(), {"rows": 1}, {"path": "m"})


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "first")
    runs.create(folder, record())
    assert runs.load(folder) == record()


def test_a_run_whose_constant_rate_did_not_warm_up_goes_on_as_it_was(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "first")
    runs.create(folder, record())
    content = files.read_json(folder.record)
    for schedule, steps in (("constant", 0), ("warmup", 10)):
        content["parameters"]["optimizer"] = {"lr": 1e-6, "schedule": schedule, "warmup_steps": 10}
        files.publish_json(folder.record, content, overwrite=True)
        found = runs.load(folder).parameters.optimizer
        assert (found.schedule, found.warmup_steps) == ("constant", steps)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "first")
    runs.require_new(folder)
    runs.create(folder, record())
    with pytest.raises(runs.RunExists, match="'first' already exists"):
        runs.create(folder, record())
    with pytest.raises(runs.RunExists, match="choose another name"):
        runs.require_new(folder)


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no run 'other'"):
        runs.load(runs.run_folder(str(tmp_path), "other"))


@pytest.mark.parametrize("name", ["", "a/b", "..", "a..b", ".hidden", "a b", "a\n", "x" * 129, "\u00e9"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        runs.check_name(name)


def test_manifests_form_a_chain(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "first")
    for step in range(2):
        previous = manifest.manifest_digest(folder, step - 1)
        manifest.publish(folder, StepManifest("first", step, previous, "0-a", "1-b", "", {}, [], {}, {}))
    assert manifest.finished_steps(folder) == [0, 1]
    assert manifest.load(folder, 0).previous == ""
    assert manifest.load(folder, 1).previous == manifest.manifest_digest(folder, 0)


def test_provenance_lists_installed_packages() -> None:
    assert any(package.startswith("pyarrow==") for package in installed_packages())
    assert len(provenance().packages_digest) == 64
