"""Stored runs as tables of SQL, and one sample of them as people read it."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from milepost.flows.sample_view import find_sample, says_more, show_sample
from milepost.flows.sql import as_rows, chosen_runs, query, write
from milepost.storage import manifest
from milepost.storage.journal import Slot

from .bench.made_run import MadeRun, make_run

STEPS = 3


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(str(tmp_path), STEPS)


def asked(made: MadeRun, statement: str) -> list[tuple[object, ...]]:
    return as_rows(query([made.folder], statement))[1]


def test_every_sample_is_in_rollouts_once(made: MadeRun) -> None:
    found = asked(made, "select step, count(distinct sample_id), count(*) from rollouts group by step order by step")
    assert found == [(step, 8, 8) for step in range(STEPS)]  # 4 groups of 2


def test_prompts_steps_metrics_verdicts_and_drops_say_of_which_run_and_step_they_are(made: MadeRun) -> None:
    for name in ("prompts", "steps", "verdicts", "drops"):
        rows = asked(made, f"select distinct run_id, step from {name} order by step")
        assert {run for run, _ in rows} == {"made"}, name
        assert {step for _, step in rows} <= set(range(STEPS)), name
    assert asked(made, "select count(*) from steps") == [(STEPS,)]
    dropped = asked(made, "select count(*) from rollouts where not kept")
    assert asked(made, "select count(*) from drops where drop_reason is not null") == dropped


def test_metrics_have_a_row_for_each_number_of_a_manifest(made: MadeRun) -> None:
    path = Path(made.folder.manifest(1))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"train/loss": 0.5}}))
    assert asked(made, "select * from metrics") == [("made", 1, "train/loss", 0.5)]


def test_a_run_without_a_step_has_empty_tables(tmp_path: Path) -> None:
    made = make_run(str(tmp_path), 0)
    for name in ("rollouts", "prompts", "steps", "metrics", "verdicts", "drops"):
        assert asked(made, f"select count(*) from {name}") == [(0,)]


def test_a_step_that_is_not_finished_is_read_as_far_as_it_is_committed(made: MadeRun) -> None:
    Path(made.folder.manifest(2)).unlink()
    shards = asked(made, "select count(distinct shard) from rollouts where step = 2")
    assert shards == [(2,)]
    assert asked(made, "select count(*) from steps") == [(2,)]


def test_several_runs_are_asked_together(tmp_path: Path) -> None:
    one = make_run(str(tmp_path), 1)
    Path(one.folder.uri).rename(tmp_path / "first")
    make_run(str(tmp_path), 2)
    record = tmp_path / "first" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"run_id": "first"}))
    assert [found.run_id for found in chosen_runs(str(tmp_path), "made", "f*")] == ["made", "first"]
    assert [found.run_id for found in chosen_runs(str(tmp_path), "made", "*")] == ["made", "first"]


def test_a_mistake_in_sql_is_one_line_in_duckdbs_words(made: MadeRun) -> None:
    with pytest.raises(ValueError, match="DuckDB refused the query: .*Did you mean") as caught:
        asked(made, "select rewards_ from rollout")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_rows_are_written_as_the_name_of_the_file_says(made: MadeRun, tmp_path: Path, kind: str) -> None:
    out = tmp_path / f"rows.{kind}"
    write(query([made.folder], "select step, count(*) as n from rollouts group by 1 order by 1"), str(out))
    if kind == "parquet":
        assert pq.read_table(out).column_names == ["step", "n"]
    elif kind == "json":
        assert [row["step"] for row in json.loads(out.read_text())] == [0, 1, 2]
    else:
        assert out.read_text().splitlines()[0] == '"step","n"'


def test_a_file_of_an_unknown_kind_is_refused(made: MadeRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end with \.csv, \.json or \.parquet"):
        write(query([made.folder], "select 1"), str(tmp_path / "rows.xlsx"))


def test_an_unknown_run_is_told_with_the_nearest(made: MadeRun) -> None:
    with pytest.raises(LookupError, match="did you mean 'made'"):
        chosen_runs(str(Path(made.folder.uri).parent), "mode")


def test_a_sample_is_found_with_all_that_is_known_of_it(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(Path(made.folder.uri).parent)
    entry = next(item for item in manifest.load(made.folder, 1).commits if Slot.parse(item["slot"]).stage == "optimize")
    trained = pq.read_table(next(iter(entry["tables"].values()))["uri"]).to_pylist()[0]
    found = find_sample(root, "made", trained["sample_id"])
    assert found["advantages"] == trained["advantages"]  # of the last stage that had it
    assert len(found["tokens"]) == len(found["response_token_ids"])
    show_sample(found)
    told = capsys.readouterr().out
    assert trained["sample_id"] in told and "verdict score" in told and "trained on" in told


@pytest.mark.parametrize(
    ("rendered", "more"),
    [("1+1", False), ("user\n1+1\nassistant\n", False), ("system\nYou have tools.\nuser\n1+1\nassistant\n", True)],
)
def test_what_a_chat_template_adds_to_the_messages_is_told_from_its_marks(rendered: str, more: bool) -> None:
    assert says_more(rendered, [{"role": "user", "content": " 1+1"}]) is more


def test_an_unknown_sample_is_told_with_the_nearest(made: MadeRun) -> None:
    with pytest.raises(LookupError, match=r"has no sample '000001-0-0000-077', did you mean '000001-0-0000-00\d'"):
        find_sample(str(Path(made.folder.uri).parent), "made", "000001-0-0000-077")
