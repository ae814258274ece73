"""What is left of a purged prompt in a table: ids, numbers of tokens, rewards and how it ended, and nothing it says.

Token ids and log-probabilities are zeros, as many as there were: with the model, those tell the text too.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.schema import SCHEMAS, check, schema_name

TOMBSTONE = "[purged]"
TOMBSTONE_JSON = json.dumps(TOMBSTONE)

_TEXTS = {"prompt": TOMBSTONE_JSON, "label": TOMBSTONE_JSON, "metadata": "{}", "response": TOMBSTONE}
_LISTS = ("prompt_token_ids", "response_token_ids", "rollout_logprobs", "old_logprobs", "ref_logprobs")
_SAID = {"reason": "purged", "extracted": None}


def entombed(table: pa.Table, prompts: Collection[str]) -> pa.Table:
    """`table` with tombstones for the rows of `prompts`, by id; doing it twice is doing it once."""
    schema = SCHEMAS[schema_name(table.schema)]
    rows = pc.is_in(table["prompt_id"].combine_chunks(), pa.array(sorted(prompts), pa.string()))
    for name in table.column_names:
        replace = _replacement(name)
        if replace is not None:
            column = table[name].combine_chunks()
            found = pc.if_else(rows, replace(column), column)
            table = table.set_column(schema.get_field_index(name), schema.field(name), found)
    return check(table, schema)


def purged_rows(table: pa.Table) -> Any:
    """Per row: whether it is a tombstone."""
    return pc.equal(table["prompt"], TOMBSTONE_JSON)


def _replacement(name: str) -> Callable[[Any], Any] | None:
    """What makes a whole column of tombstones; None for one that stays."""
    if name in _TEXTS:
        return lambda column: pa.array([_TEXTS[name]] * len(column), pa.string())
    if name in _LISTS:
        return _zeros
    if name == "response_escaped":
        return lambda column: pa.array([False] * len(column))
    return _silent if name == "verdict" else None


def _zeros(column: Any) -> Any:
    """As many zeros as each list has values; null for null."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(np.zeros(int(offsets[-1])), column.type.value_type)
    lists = pa.ListArray.from_arrays(pa.array(offsets), values, type=column.type)
    return pc.if_else(pc.is_null(column), pa.scalar(None, column.type), lists)


def _silent(column: Any) -> Any:
    """Each verdict with its score, parts and grader, and without the words that it was given for."""
    said = [None if text is None else json.loads(text) for text in column.to_pylist()]
    return pa.array([None if one is None else json.dumps({**one, **_SAID}) for one in said], pa.string())
