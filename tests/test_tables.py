"""Tables: one schema, a digest that is checked, and text that is never lost."""

import math
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage import files, text
from milepost.storage.schema import PROMPTS, ROLLOUTS, check, from_rows
from milepost.storage.schema_versions import SchemaMismatch
from milepost.storage.tables import (
    DamagedTable,
    TableRef,
    concat,
    encode,
    read_bytes,
    read_table,
    with_columns,
    write_table,
)


def rollout(sample_id: str = "0-0", **columns: object) -> dict[str, object]:
    row: dict[str, object] = {
        "run_id": "r",
        "step": 0,
        "shard": 0,
        "group_id": "g",
        "sample_id": sample_id,
        "prompt_id": "p",
        "dataset": "d",
        "prompt": '"1+1="',
        "prompt_token_ids": [5, 6],
        "label": '"2"',
        "response": "2",
        "response_escaped": False,
        "response_token_ids": [7, 8],
        "loss_mask": [1, 1],
        "rollout_logprobs": [-0.1, -0.25],
        "finish_reason": "stop",
        "status": "completed",
        "weight_version_min": 3,
        "weight_version_max": 3,
        "weights_digest": "ab",
        "turns": 1,
        "seed": 1,
        "sampling": "{}",
        "metadata": "{}",
    }
    return row | columns


def table(*rows: dict[str, object]) -> pa.Table:
    return from_rows(list(rows) or [rollout()], ROLLOUTS)


def test_a_table_survives_the_round_trip(tmp_path: Path) -> None:
    ref = write_table(str(tmp_path / "generated"), table(rollout("a"), rollout("b")), ROLLOUTS)
    assert ref.rows == 2
    assert read_table(ref).equals(table(rollout("a"), rollout("b")))


def test_a_table_survives_the_round_trip_in_memory() -> None:
    ref = write_table("memory://tables/generated", table(), ROLLOUTS)
    assert read_table(ref).equals(table())


def test_equal_tables_are_equal_files() -> None:
    assert encode(table()) == encode(table())


def test_writing_the_same_table_twice_is_one_file(tmp_path: Path) -> None:
    first = write_table(str(tmp_path / "x"), table(), ROLLOUTS)
    assert write_table(str(tmp_path / "x"), table(), ROLLOUTS) == first
    assert len(list(tmp_path.iterdir())) == 1


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    ref = write_table(str(tmp_path / "x"), table(), ROLLOUTS)
    data = bytearray(files.read(ref.uri))
    for position in range(0, len(data), 97):
        data[position] ^= 1
        Path(ref.uri).write_bytes(data)
        with pytest.raises(DamagedTable, match="digest"):
            read_table(ref)
        data[position] ^= 1


def test_a_table_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        read_table(TableRef(str(tmp_path / "gone.parquet"), 1, "0" * 64, "rollouts"))


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"unknown \['extra'\]"):
        check(table().append_column("extra", pa.array([1])), ROLLOUTS)


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"missing \['reward'\]"):
        check(table().drop_columns(["reward"]), ROLLOUTS)


def test_a_null_in_a_required_column_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="'response' of schema rollouts holds a null"):
        from_rows([rollout(response=None)], ROLLOUTS)


def test_an_unknown_key_of_a_row_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"\['rewrd'\]"):
        from_rows([rollout(rewrd=1.0)], ROLLOUTS)


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    with pytest.raises(SchemaMismatch, match="not a Milepost table"):
        read_bytes((tmp_path / "foreign.parquet").read_bytes())


def test_a_table_from_a_newer_milepost_is_refused() -> None:
    newer = table().replace_schema_metadata({**ROLLOUTS.metadata, b"milepost.schema_version": b"99"})
    sink = pa.BufferOutputStream()
    pq.write_table(newer, sink)
    with pytest.raises(SchemaMismatch, match="99 is newer than the 4 this Milepost reads"):
        read_bytes(sink.getvalue().to_pybytes())


def test_with_columns_changes_only_what_it_names() -> None:
    scored = with_columns(table(), {"reward": [0.5]})
    assert scored["reward"].to_pylist() == [0.5]
    assert scored.drop_columns(["reward"]).equals(table().drop_columns(["reward"]))


def test_concat_of_nothing_is_an_empty_table_of_the_schema() -> None:
    assert concat([], PROMPTS).schema.equals(PROMPTS)


def test_log_probabilities_keep_their_float32_bits(tmp_path: Path) -> None:
    ref = write_table(str(tmp_path / "x"), table(), ROLLOUTS)
    expected = pa.array([[-0.1, -0.25]], pa.list_(pa.float32()))
    assert read_table(ref)["rollout_logprobs"].combine_chunks().equals(expected)


def test_the_file_is_readable_by_duckdb_and_pandas(tmp_path: Path) -> None:
    ref = write_table(str(tmp_path / "x"), with_columns(table(), {"reward": [0.5]}), ROLLOUTS)
    counted = duckdb.sql(f"select avg(reward), sum(len(response_token_ids)) from '{ref.uri}'").fetchall()
    assert counted == [(0.5, 2)]
    assert pd.read_parquet(ref.uri)["reward"].tolist() == [0.5]


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_is_stored_without_loss(value: str) -> None:
    stored, escaped = text.escape(value)
    stored.encode()
    assert text.unescape(stored, escaped) == value


def test_a_lone_surrogate_is_flagged_and_comes_back() -> None:
    stored, escaped = text.escape("a\ud835")
    assert (stored, escaped) == ("a\\ud835", True)
    row = from_rows([rollout(response=stored, response_escaped=escaped)], ROLLOUTS)
    assert text.unescape(row["response"][0].as_py(), row["response_escaped"][0].as_py()) == "a\ud835"


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=[])), st.lists)
)
def test_any_json_value_is_stored_without_loss(value: object) -> None:
    stored = text.to_json(value)
    stored.encode()
    assert text.from_json(stored) == value


def test_nan_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        text.to_json({"x": math.nan})
