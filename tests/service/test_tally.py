"""A number that several processes count together."""

from __future__ import annotations

from service.tally import Tally


def test_one_process_counts_alone() -> None:
    """From zero, up and down."""
    tally = Tally()
    tally.add()
    tally.add(4)
    tally.add(-2)
    assert tally.total() == 3
    assert Tally().total() == 0


def test_each_writes_its_cell_and_reads_all() -> None:
    """What one adds is in everybody's total."""
    cells = [0, 0, 0]
    tallies = [Tally(cells, index) for index in range(3)]
    for count, tally in enumerate(tallies, 1):
        tally.add(count)
    assert cells == [1, 2, 3]
    assert {tally.total() for tally in tallies} == {6}
