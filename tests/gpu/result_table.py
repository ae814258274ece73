"""Results as Markdown tables."""

from collections.abc import Sequence
from typing import Any


def table(head: list[str], rows: Sequence[Sequence[Any]]) -> str:
    """Numbers with a fraction are shown with three digits, what is None as nothing."""
    lines = [head, ["---"] * len(head), *([_shown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
