"""A table of a page as a description, and the Markdown that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.loadtest.published import results
from tests.loadtest.published.cells import Cell


@dataclass(frozen=True)
class Column:
    """A head and what stands below it."""

    head: str
    cell: Cell | str = ""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        labels: its first cells, as they are written.
        key: given to the cells of all columns, most often the name of an arm.
        cells: stand instead of the columns' cells, all of them.
        instead: stand instead of some, by the number of the column from 0.
    """

    labels: Sequence[str]
    key: str = ""
    cells: Sequence[Cell | str] | None = None
    instead: Mapping[int, Cell | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: in the page's markers.
        source: name of the JSON that its figures are of, without ``.json``; empty if each cell says
            its own.
        labels: heads of the first columns.
        columns: the others.
        rows: all of them.
        align: a letter per column, ``l`` or ``r``; by default labels are left, all others right.
        grouped: whether a first label that repeats the one above it is left out.
    """

    name: str
    source: str
    labels: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Row]
    align: str = ""
    grouped: bool = True

    @property
    def head(self) -> list[str]:
        """Heads of all columns."""
        return [*self.labels, *(column.head for column in self.columns)]

    def body(self) -> list[list[str]]:
        """Texts of all cells, row by row."""
        found: list[list[str]] = []
        first = ""
        for row in self.rows:
            labels = list(row.labels)
            if self.grouped and found and len(labels) > 1 and labels[0] == first:
                labels[0] = ""
            first = row.labels[0]
            found.append([*labels, *self._figures(row)])
        return found

    def _figures(self, row: Row) -> list[str]:
        result = results.load(self.source) if self.source else results.Result("", {})
        cells: list[Cell | str] = list(row.cells or (column.cell for column in self.columns))
        for i, other in row.instead.items():
            cells[i] = other
        assert len(cells) == len(self.columns), f"{self.name}, {row.labels}: {len(cells)} cells"
        return [cell if isinstance(cell, str) else cell(result, row.key) for cell in cells]


def markdown(table: Table) -> str:
    """The whole table, each line with its end."""
    align = table.align or "l" * len(table.labels) + "r" * len(table.columns)
    rule = "|".join("---:" if letter == "r" else "---" for letter in align)
    lines = [_line(table.head), f"|{rule}|\n", *(_line(row) for row in table.body())]
    return "".join(lines)


def cells_of(text: str) -> list[list[str]]:
    """Cells of a table in Markdown, row by row, without the rule under its head."""
    rows = [line.strip("|").split("|") for line in text.strip().splitlines()]
    return [[cell.strip() for cell in row] for i, row in enumerate(rows) if i != 1]


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"
