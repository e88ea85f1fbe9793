"""Rows of the check's table; a row may be a fact, a measurement with a goal, or a proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        section: which check.
        name: what.
        value: number or word.
        unit: of a number.
        ok: True or False for proofs, which decide the exit status; None otherwise.
        goal: in words, met or not: never decides the exit status.
        note: the reason of what is missing, the error of what failed.
    """

    section: str
    name: str
    value: float | str
    unit: str = ""
    ok: bool | None = None
    goal: str = ""
    note: str = ""


def table(rows: Sequence[Row]) -> str:
    """Aligned lines, one per row."""
    cells = [
        (
            row.section,
            row.name,
            row.value if isinstance(row.value, str) else f"{row.value:.4g}",
            row.unit,
            {True: "ok", False: "WRONG", None: ""}[row.ok],
            "; ".join(filter(None, [row.goal, row.note])),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[5]])
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """For JSON: the rows, and whether a proof failed."""
    return {"wrong": wrong(rows), "rows": [asdict(row) for row in rows]}


def wrong(rows: Sequence[Row]) -> int:
    """Proofs that failed."""
    return sum(row.ok is False for row in rows)


def failed(section: str, name: str, error: BaseException) -> Row:
    """A check that could not be carried out counts as failed."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Row(section, name, "failed", ok=False, note=reason)
