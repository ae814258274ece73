"""The Arrow schemas of everything Milepost stores: every column has one type for ever, checked on write and on read."""

import pyarrow as pa

SCHEMA_VERSION = 1

_VERSION_KEY = b"milepost.schema_version"
_NAME_KEY = b"milepost.schema"


class SchemaMismatch(ValueError):
    """A table's columns are not those of the schema it claims."""


def _schema(name: str, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={_NAME_KEY: name.encode(), _VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


_TOKENS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())

PROMPTS = _schema(
    "prompts",
    [
        _required("prompt_id", pa.string()),  # hash of the content
        _required("group_id", pa.string()),  # this serving of the prompt: unique in a run
        _required("dataset", pa.string()),
        _required("row", pa.int64()),  # position in the data set, for people
        _required("epoch", pa.int32()),
        _required("prompt", pa.string()),  # JSON: a string or a list of messages
        _required("prompt_token_ids", _TOKENS),
        _required("label", pa.string()),  # JSON
        _required("metadata", pa.string()),  # JSON object
    ],
)

ROLLOUTS = _schema(
    "rollouts",
    [
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
        _required("rollout_logprobs", _FLOATS),  # per response token, at the sampling temperature
        _required("finish_reason", pa.string()),  # stop, length, abort
        _required("status", pa.string()),  # completed, truncated, aborted, invalid
        pa.field("weight_version_min", pa.int64()),
        pa.field("weight_version_max", pa.int64()),
        pa.field("weights_digest", pa.string()),
        _required("turns", pa.int32()),
        _required("seed", pa.int64()),
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
    ],
)

SCHEMAS = {"prompts": PROMPTS, "rollouts": ROLLOUTS}

# The columns each stage fills; every other column must pass through it unchanged.
STAGE_COLUMNS = {
    "score": {"reward", "rewards", "verdict"},
    "filter": {"kept", "drop_reason"},
    "optimize": {"advantages", "old_logprobs", "ref_logprobs"},
}


def schema_name(schema: pa.Schema) -> str:
    """The name a Milepost schema carries; raises SchemaMismatch for a foreign one."""
    metadata = schema.metadata or {}
    name: str = metadata.get(_NAME_KEY, b"").decode()
    if name not in SCHEMAS:
        raise SchemaMismatch(f"not a Milepost table: its footer names the schema {name!r}, known are {sorted(SCHEMAS)}")
    return name


def check(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` in exactly `schema` (column order, types, no null in required columns), or SchemaMismatch."""
    missing = [name for name in schema.names if name not in table.column_names]
    extra = [name for name in table.column_names if name not in schema.names]
    if missing or extra:
        raise SchemaMismatch(f"columns differ from schema {schema_name(schema)}: missing {missing}, unknown {extra}")
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise SchemaMismatch(f"column {field.name!r} of schema {schema_name(schema)} holds a null")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise SchemaMismatch(f"a column does not have the type of schema {schema_name(schema)}: {error}") from error


def migrate(table: pa.Table) -> pa.Table:
    """A table as read, in the newest version of its schema; a version newer than this code is refused."""
    schema = SCHEMAS[schema_name(table.schema)]
    version = int(table.schema.metadata.get(_VERSION_KEY, b"0"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"schema version {version} is newer than the {SCHEMA_VERSION} this Milepost reads: upgrade Milepost"
        )
    return check(table, schema)


def from_rows(rows: list[dict[str, object]], schema: pa.Schema) -> pa.Table:
    """A table of `schema` from dictionaries; an absent key is null, an unknown key is refused."""
    unknown = sorted({key for row in rows for key in row} - set(schema.names))
    if unknown:
        raise SchemaMismatch(f"unknown columns {unknown} for schema {schema_name(schema)}")
    return check(pa.Table.from_pylist(rows, schema=schema), schema)
