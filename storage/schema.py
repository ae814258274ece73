"""The Arrow schemas of everything Milepost stores: every column has one type for ever, checked on write and on read."""

import pyarrow as pa

from milepost.storage.schema_versions import Catalog, SchemaMismatch, Version

VERSIONS = {
    1: Version("0.1.0"),
    2: Version("0.1.0"),  # samples made elsewhere: finish_reason, rollout_logprobs and seed may be null
    3: Version("0.1.0", {"rollouts": {"importance_weights": None}}),
    4: Version("0.1.0", {"rollouts": {"values": None, "returns": None}}),
}


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())

_PROMPTS = [
    _required("prompt_id", pa.string()),  # hash of the content
    _required("group_id", pa.string()),  # this serving of the prompt: unique in a run
    _required("dataset", pa.string()),
    _required("row", pa.int64()),  # position in the data set, for people
    _required("epoch", pa.int32()),
    _required("prompt", pa.string()),  # JSON: a string or a list of messages
    _required("prompt_token_ids", _TOKENS),
    _required("label", pa.string()),  # JSON
    _required("metadata", pa.string()),  # JSON object
]

_ROLLOUTS = [
    _required("run_id", pa.string()),
    _required("step", pa.int32()),
    _required("shard", pa.int32()),
    _required("group_id", pa.string()),
    _required("sample_id", pa.string()),
    _required("prompt_id", pa.string()),
    _required("dataset", pa.string()),
    _required("prompt", pa.string()),  # JSON
    _required("prompt_token_ids", _TOKENS),
    _required("label", pa.string()),  # JSON
    _required("response", pa.string()),
    _required("response_escaped", pa.bool_()),  # the text holds JSON escapes: it was not valid Unicode
    _required("response_token_ids", _TOKENS),
    _required("loss_mask", pa.list_(pa.uint8())),  # per response token: 1 is trained
    pa.field("rollout_logprobs", _FLOATS),  # per response token, at the sampling temperature; null: not known
    pa.field("finish_reason", pa.string()),  # stop, length, abort; null: not known
    _required("status", pa.string()),  # completed, truncated, aborted, invalid, interrupted
    pa.field("weight_version_min", pa.int64()),
    pa.field("weight_version_max", pa.int64()),
    pa.field("weights_digest", pa.string()),
    _required("turns", pa.int32()),
    pa.field("seed", pa.int64()),  # null: not known
    _required("sampling", pa.string()),  # JSON object
    _required("metadata", pa.string()),  # JSON object
    pa.field("reward", pa.float64()),  # null: not scorable
    pa.field("rewards", pa.map_(pa.string(), pa.float64())),  # named parts
    pa.field("verdict", pa.string()),  # JSON object
    pa.field("kept", pa.bool_()),
    pa.field("drop_reason", pa.string()),
    pa.field("advantages", _FLOATS),  # per response token
    pa.field("old_logprobs", _FLOATS),
    pa.field("ref_logprobs", _FLOATS),
    pa.field("importance_weights", _FLOATS),  # of what the engine made, for the policy that is trained; 0: rejected
    pa.field("values", _FLOATS),  # by the critic, of what is still to come before each response token
    pa.field("returns", _FLOATS),  # what the critic is to learn to say there
]

CATALOG = Catalog({"prompts": _PROMPTS, "rollouts": _ROLLOUTS}, VERSIONS)
SCHEMA_VERSION = CATALOG.newest
PROMPTS, ROLLOUTS = CATALOG.schema("prompts"), CATALOG.schema("rollouts")
SCHEMAS = {"prompts": PROMPTS, "rollouts": ROLLOUTS}

# The columns each stage fills; every other column must pass through it unchanged.
STAGE_COLUMNS = {
    "score": {"reward", "rewards", "verdict"},
    "filter": {"kept", "drop_reason"},
    "optimize": {"advantages", "old_logprobs", "ref_logprobs", "importance_weights", "values", "returns"},
}


def schema_name(schema: pa.Schema) -> str:
    """The name a Milepost schema carries; raises SchemaMismatch for a foreign one."""
    return CATALOG.name_of(schema)


def check(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` in exactly `schema` (column order, types, no null in required columns), or SchemaMismatch."""
    return CATALOG.check(table, schema)


def migrate(table: pa.Table, catalog: Catalog = CATALOG) -> pa.Table:
    """A table as read, in the newest version of its schema; a version newer than this code is refused."""
    return catalog.migrate(table)


def from_rows(rows: list[dict[str, object]], schema: pa.Schema) -> pa.Table:
    """A table of `schema` from dictionaries; an absent key is null, an unknown key is refused."""
    unknown = sorted({key for row in rows for key in row} - set(schema.names))
    if unknown:
        raise SchemaMismatch(f"unknown columns {unknown} for schema {schema_name(schema)}")
    return check(pa.Table.from_pylist(rows, schema=schema), schema)
