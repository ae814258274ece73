"""The claim of a flow on a run leaves nothing of a run that was refused, and takes nothing of another's."""

import asyncio
from pathlib import Path

import pytest

from milepost.flows.claim import claimed
from milepost.storage import files, runs
from milepost.storage.lease import LeaseHeld, hold
from milepost.storage.runs import RunFolder


async def refused(folder: RunFolder, root: str) -> None:
    async with claimed(folder, root):
        raise ValueError("no such reward")


def test_a_run_that_is_refused_leaves_no_folder_of_its_name(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "wrong")
    with pytest.raises(ValueError, match="no such reward"):
        asyncio.run(refused(folder, str(tmp_path)))
    assert files.names(str(tmp_path)) == []


def test_one_that_another_process_has_just_begun_keeps_its_claim(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "begun")
    with hold(folder) as lease:
        with pytest.raises(LeaseHeld):
            asyncio.run(refused(folder, str(tmp_path)))
        lease.check()


def test_a_run_that_has_a_record_keeps_all_of_it(tmp_path: Path) -> None:
    folder = runs.run_folder(str(tmp_path), "there")
    files.publish_json(folder.record, {})
    with pytest.raises(ValueError, match="no such reward"):
        asyncio.run(refused(folder, str(tmp_path)))
    assert files.names(folder.uri) == ["lease", "run.json"]
