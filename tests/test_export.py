"""Samples of a run in files that others read: whole or not there, and a row for each sample."""

import json
from pathlib import Path

import pandas as pd
import pytest

from milepost.flows.export import export, frame
from milepost.flows.sql import as_rows, query
from milepost.storage.documents import TOKEN_COLUMNS

from .bench.made_run import MadeRun, make_run
from .test_cli import milepost

STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(str(tmp_path_factory.mktemp("made")), STEPS)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_sample_is_a_row_of_messages_tokens_reward_and_versions(made: MadeRun, tmp_path: Path) -> None:
    done = export(made.folder, str(tmp_path / "x.jsonl"))
    rows = lines(tmp_path / "x.jsonl")
    assert (done.rows, done.steps) == (len(rows), STEPS) == (24, STEPS)
    first = rows[0]
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["messages"][1]["content"] == "22222" and first["label"] == "2" and first["rewards"] == {"made": 0.0}
    assert len(first["rollout_logprobs"]) == len(first["loss_mask"]) == len(first["response_token_ids"]) == 5
    assert first["weight_version_min"] == 0 and first["weights_digest"] and first["reward"] == 0.0


def test_parquet_and_a_dataframe_have_the_same_rows(made: MadeRun, tmp_path: Path) -> None:
    export(made.folder, str(tmp_path / "x.parquet"), steps="1:3")
    stored, found = (
        pd.read_parquet(tmp_path / "x.parquet"),
        frame("made", str(Path(made.folder.uri).parent), steps="1:3"),
    )
    assert list(stored.columns) == list(found.columns) and set(found["step"]) == {1, 2}
    assert stored["sample_id"].tolist() == found["sample_id"].tolist() and len(found) == 16
    assert found["messages"][0][-1] == {"role": "assistant", "content": "22222"}


def test_only_what_was_trained_on_is_exported_with_its_advantages(made: MadeRun, tmp_path: Path) -> None:
    export(made.folder, str(tmp_path / "x.jsonl"), kept=True)
    trained = as_rows(query([made.folder], "select sample_id from batches order by 1"))[1]
    rows = lines(tmp_path / "x.jsonl")
    assert sorted(row["sample_id"] for row in rows) == [name for (name,) in trained] and len(rows) < 24
    assert all(row["kept"] and row["advantages"] for row in rows)


def test_tokens_are_left_out_when_told(made: MadeRun, tmp_path: Path) -> None:
    for name in ("x.jsonl", "x.parquet"):
        export(made.folder, str(tmp_path / name), tokens=False)
    assert not set(TOKEN_COLUMNS) & (
        lines(tmp_path / "x.jsonl")[0].keys() | set(pd.read_parquet(tmp_path / "x.parquet"))
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_table_that_is_damaged_leaves_no_file(tmp_path: Path, kind: str) -> None:
    made = make_run(str(tmp_path), 2)
    table = made.table(1, "filter-r0-s001")
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(ValueError, match="has digest .* was written: restore it from a copy"):
        export(made.folder, str(tmp_path / "out" / f"x.{kind}"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_is_replaced_only_when_told(made: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="choose another name, or say --overwrite"):
        export(made.folder, str(out))
    assert out.read_text() == "mine"
    assert export(made.folder, str(out), overwrite=True).rows == len(lines(out))


def test_a_run_is_exported_to_where_a_store_is(made: MadeRun) -> None:
    assert export(made.folder, "memory://exported/x.jsonl").rows == 24
    with pytest.raises(FileExistsError, match="--overwrite"):
        export(made.folder, "memory://exported/x.jsonl")


def test_what_cannot_be_exported_is_one_sentence(made: MadeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end with \.jsonl or \.parquet"):
        export(made.folder, str(tmp_path / "x.csv"))
    with pytest.raises(ValueError, match="the run has steps 0 to 2"):
        export(made.folder, str(tmp_path / "x.jsonl"), steps="2:9")
    with pytest.raises(LookupError, match="has finished no step"):
        export(make_run(str(tmp_path), 0).folder, str(tmp_path / "x.jsonl"))


@pytest.mark.slow
def test_the_command_exports_and_names_the_nearest_run(made: MadeRun, tmp_path: Path) -> None:
    root, out = str(Path(made.folder.uri).parent), str(tmp_path / "x.jsonl")
    done = milepost("export", "made", "--root", root, "--out", out, "--kept", "--json")
    assert json.loads(done.stdout)["rows"] == len(lines(tmp_path / "x.jsonl"))
    assert "did you mean 'made'" in milepost("export", "mode", "--root", root, "--out", "y.jsonl").stderr
