"""A number that only ever counts for the whole server, however many API processes it has.

Each process writes its own cell and reads all of them: no lock, and no addition is lost.
"""

from __future__ import annotations

from collections.abc import MutableSequence


class Tally:
    """One such number; 0 at the start.

    Args:
        cells: one for each process, in shared memory; by default of this process alone.
        index: which of them is this process's.
    """

    def __init__(self, cells: MutableSequence[int] | None = None, index: int = 0) -> None:
        self._cells = [0] if cells is None else cells
        self._index = index

    def add(self, count: int = 1) -> None:
        """Count ``count`` more; negative takes back what this process counted."""
        self._cells[self._index] += count

    def total(self) -> int:
        """Over all processes."""
        return sum(self._cells)
