"""What an earlier Milepost wrote is read as if it were written today; what a later one wrote names what to install."""

import asyncio
import json
import shutil
import tomllib
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows.export import frame
from milepost.flows.lineage import answer
from milepost.flows.report import write_report
from milepost.flows.sample_view import find_sample
from milepost.flows.sql import as_rows, query
from milepost.flows.table_view import create_view
from milepost.flows.train import resume
from milepost.storage import runs
from milepost.storage.ancestry import Ancestry
from milepost.storage.runs import RunFolder
from milepost.storage.schema import CATALOG, ROLLOUTS, SCHEMA_VERSION, VERSIONS, from_rows
from milepost.storage.schema_versions import Catalog, Version
from milepost.storage.tables import TableRef, read_table, write_table
from milepost.storage.verify import verify
from milepost.storage.verify_tables import Fault, load_table

from .test_tables import rollout

FIXTURES = Path(__file__).parent / "fixtures"
OLD = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
INSTALL = "pip install 'milepost>=9.1.0'"

# What a next version might be: a column that may be null, and one that may not.
ADDED = [pa.field("judge", pa.string()), pa.field("votes", pa.list_(pa.int32()), nullable=False)]
NEXT = Catalog(
    {**CATALOG.fields, "rollouts": [*CATALOG.fields["rollouts"], *ADDED]},
    {**VERSIONS, SCHEMA_VERSION + 1: Version("9.1.0", {"rollouts": {"judge": None, "votes": [0]}})},
)


@pytest.fixture(params=OLD)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    """A copy of a run that an earlier Milepost wrote."""
    shutil.copytree(FIXTURES / request.param / "old", tmp_path / "old")
    return runs.run_folder(str(tmp_path), "old")


def newer(folder: Path) -> TableRef:
    row = rollout("new") | {"judge": "j", "votes": [3]}
    table = pa.Table.from_pylist([row], schema=NEXT.schema("rollouts"))
    return write_table(str(folder / "new"), table, NEXT.schema("rollouts"), NEXT)


def test_a_run_of_an_earlier_version_has_no_fault(old: RunFolder) -> None:
    found = verify(old)
    assert (found.faults, found.steps, found.samples) == ([], 2, 8)


def test_a_run_of_an_earlier_version_is_asked_shown_and_exported(old: RunFolder) -> None:
    root = str(Path(old.uri).parent)
    rows = as_rows(query([old], "select sample_id, reward from rollouts order by 1"))[1]
    assert [name for name, _ in rows] == [f"00000{step}-0-000{group}-00{i}" for step, group, i in places()]
    assert find_sample(root, "old", rows[-1][0])["reward"] == rows[-1][1]
    assert sorted(frame("old", root)["sample_id"]) == [name for name, _ in rows]


def places() -> list[tuple[int, int, int]]:
    return [(step, group, index) for step in range(2) for group in range(2) for index in range(2)]


def test_a_run_of_an_earlier_version_has_a_report_and_a_lineage(old: RunFolder) -> None:
    found = answer("checkpoint:old@2", str(Path(old.uri).parent))
    assert isinstance(found, Ancestry) and [step.step for step in found.steps] == [0, 1]
    assert Path(write_report(old)).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "ray_cluster")
def test_a_run_goes_on_under_a_later_version_and_is_one_table(old: RunFolder, model_dir: str) -> None:
    record = json.loads(Path(old.record).read_text())
    record["model"]["folder"] = model_dir
    Path(old.record).write_text(json.dumps(record))
    asyncio.run(resume("old", str(Path(old.uri).parent), 3))
    refs = [json.loads(path.read_text()) for path in Path(old.step(2), "journal").glob("filter-*.json")]
    assert [ref["tables"]["rollouts"]["version"] for ref in refs] == [SCHEMA_VERSION]
    assert as_rows(query([old], "select step, count(*) from rollouts group by 1 order by 1"))[1] == [
        (step, 4) for step in range(3)
    ]
    assert (verify(old).faults, len(frame("old", str(Path(old.uri).parent)))) == ([], 12)


def test_every_earlier_version_has_a_stored_run() -> None:
    """Whoever adds a version stores what the version before wrote: tests/fixtures/README.md says how."""
    numbers = [name.split("-") for name in OLD]
    assert set(range(1, runs.SCHEMA_VERSION)) <= {int(number[1]) for number in numbers}
    assert set(range(1, SCHEMA_VERSION)) <= {int(number[3]) for number in numbers}


def test_versions_are_those_of_releases_up_to_this_one() -> None:
    project = tomllib.loads((FIXTURES.parent.parent / "pyproject.toml").read_text())["project"]
    for found in ({number: version.release for number, version in VERSIONS.items()}, runs.RELEASES):
        releases = [tuple(map(int, found[number].split("."))) for number in sorted(found)]
        assert sorted(found) == list(range(1, len(found) + 1)) and releases == sorted(releases)
        assert releases[-1] <= tuple(map(int, project["version"].split(".")))


def test_an_older_table_has_nulls_and_defaults_in_the_columns_that_were_added(tmp_path: Path) -> None:
    ref = write_table(str(tmp_path / "x"), from_rows([rollout("a"), rollout("b")], ROLLOUTS), ROLLOUTS)
    table = read_table(ref, NEXT)
    assert table.schema.equals(NEXT.schema("rollouts"), check_metadata=True)
    assert (table["judge"].to_pylist(), table["votes"].to_pylist()) == ([None, None], [[0], [0]])


def test_tables_of_several_versions_are_one_table_in_sql(tmp_path: Path) -> None:
    older = write_table(str(tmp_path / "x"), from_rows([rollout("old")], ROLLOUTS), ROLLOUTS)
    for tables, rows in (
        ([older], [("old", None, [0])]),
        ([older, newer(tmp_path)], [("new", "j", [3]), ("old", None, [0])]),
        ([newer(tmp_path)], [("new", "j", [3])]),
        ([], []),
    ):
        connection = duckdb.connect()
        create_view(connection, "rollouts", tables, schema="rollouts", catalog=NEXT)
        assert connection.sql("select sample_id, judge, votes from rollouts order by 1").fetchall() == rows


def test_a_newer_table_is_refused_with_what_to_install(tmp_path: Path) -> None:
    ref = newer(tmp_path)
    with pytest.raises(ValueError, match="its schema version .* is newer than .*" + INSTALL.replace(">", "\\>")):
        read_table(ref)
    with pytest.raises(ValueError, match="cannot be read: its schema version"):
        create_view(duckdb.connect(), "rollouts", [ref], schema="rollouts", catalog=CATALOG)
    fault = load_table(ref.uri, ref)
    assert isinstance(fault, Fault) and fault.fix == INSTALL and "newer than" in fault.problem


@given(st.lists(st.sampled_from([None, 0, 7]), max_size=4), st.data())
def test_a_table_of_any_version_is_read_in_the_newest(defaults: list[int | None], data: st.DataObject) -> None:
    """Every version adds a column; one that may not be null has a default."""
    first = [pa.field("x", pa.int32(), nullable=False)]
    later = [pa.field(f"c{at}", pa.int64(), nullable=value is None) for at, value in enumerate(defaults)]
    versions = {1: Version("0.1.0")} | {
        at + 2: Version(f"0.{at + 2}.0", {"t": {f"c{at}": value}}) for at, value in enumerate(defaults)
    }
    written = data.draw(st.integers(1, len(versions)))
    before = Catalog({"t": [*first, *later[: written - 1]]}, {at: versions[at] for at in range(1, written + 1)})
    row = {"x": 1} | {f"c{at}": 5 for at in range(written - 1)}
    table = pa.Table.from_pylist([row], schema=before.schema("t"))
    found = Catalog({"t": [*first, *later]}, versions).migrate(table)
    assert found.to_pylist() == [{f"c{at}": value for at, value in enumerate(defaults)} | row]
