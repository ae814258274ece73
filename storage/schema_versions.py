"""How the schemas of stored tables may change, and how a table of any version is read in the newest.

A version adds columns, or lets a column be null from now on. No column is ever renamed, removed or given another type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

VERSION_KEY = b"milepost.schema_version"
NAME_KEY = b"milepost.schema"
RELEASE_KEY = b"milepost.reader"  # the first release that reads the table: what an older one tells people to install


class SchemaMismatch(ValueError):
    """A table's columns are not those of the schema it claims."""


class NewerTable(SchemaMismatch):
    """A table is of a version that this Milepost does not know. `fix` is what to install."""

    def __init__(self, found: int, known: int, release: str) -> None:
        self.fix = f"pip install 'milepost>={release}'" if release else "install a newer milepost"
        super().__init__(f"its schema version {found} is newer than the {known} this Milepost reads: {self.fix}")


@dataclass(frozen=True)
class Version:
    """One version of the schemas: the first release that reads it, and the columns that it added to each schema.

    A column that was added has a default, which is what tables from before have in it; None only if it may be null.
    """

    release: str
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalog:
    """Every schema as it is in the newest of `versions`, by name."""

    fields: Mapping[str, Sequence[pa.Field]]
    versions: Mapping[int, Version]

    @property
    def newest(self) -> int:
        return max(self.versions)

    def schema(self, name: str) -> pa.Schema:
        release = self.versions[self.newest].release
        footer = {NAME_KEY: name.encode(), VERSION_KEY: str(self.newest).encode(), RELEASE_KEY: release.encode()}
        return pa.schema(self.fields[name], metadata=footer)

    def name_of(self, schema: pa.Schema) -> str:
        """The name a Milepost schema carries; raises SchemaMismatch for a foreign one."""
        name: str = (schema.metadata or {}).get(NAME_KEY, b"").decode()
        if name not in self.fields:
            known = sorted(self.fields)
            raise SchemaMismatch(f"not a Milepost table: its footer names the schema {name!r}, known are {known}")
        return name

    def added_since(self, name: str, version: int) -> dict[str, Any]:
        """The columns that a table of `version` lacks, and what it is taken to have in them."""
        later = [found for number, found in sorted(self.versions.items()) if number > version]
        return {column: default for found in later for column, default in found.added.get(name, {}).items()}

    def require_known(self, schema: pa.Schema) -> None:
        """NewerTable when a newer Milepost wrote a table with this schema."""
        if version_of(schema) > self.newest:
            release = schema.metadata.get(RELEASE_KEY, b"").decode()
            raise NewerTable(version_of(schema), self.newest, release)

    def migrate(self, table: pa.Table) -> pa.Table:
        """A table as read, in the newest version of its schema; a newer one is refused."""
        name = self.name_of(table.schema)
        self.require_known(table.schema)
        schema = self.schema(name)
        for column, default in self.added_since(name, version_of(table.schema)).items():
            if column not in table.column_names:
                type_ = schema.field(column).type
                table = table.append_column(column, pa.array([default] * table.num_rows, type_))
        return self.check(table, schema)

    def check(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """`table` in exactly `schema` (column order, types, no null in required columns), or SchemaMismatch."""
        name = self.name_of(schema)
        missing = [column for column in schema.names if column not in table.column_names]
        extra = [column for column in table.column_names if column not in schema.names]
        if missing or extra:
            raise SchemaMismatch(f"columns differ from schema {name}: missing {missing}, unknown {extra}")
        for column in schema:
            if not column.nullable and table.column(column.name).null_count:
                raise SchemaMismatch(f"column {column.name!r} of schema {name} holds a null")
        try:
            return table.select(schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise SchemaMismatch(f"a column does not have the type of schema {name}: {error}") from error


def version_of(schema: pa.Schema) -> int:
    """The version that a table's footer says; 0 for a foreign one."""
    return int((schema.metadata or {}).get(VERSION_KEY, b"0"))
