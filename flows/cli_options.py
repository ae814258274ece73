"""The options that commands share, and how commands print."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

FAULTY = 3  # a check found something wrong, or something other than what is stored

Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override, as section.field=value; repeatable.")
]
Root = Annotated[str | None, typer.Option(help="Folder of all runs (default: runs).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
RunName = Annotated[str, typer.Argument(help="Name of the run.")]


def print_values(values: Mapping[str, Any], title: str) -> None:
    """A small table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """A table of rows."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console().print(table)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_done(summary: Mapping[str, Any], as_json: bool) -> None:
    """What a run came to."""
    if as_json:
        print(json.dumps(summary))
    else:
        print_values(summary, "done")
