"""Figures in running text that are computed from a result: how, and how they are compared.

See :mod:`tests.loadtest.published.claims` for the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.loadtest.published.cells import Cell
from tests.loadtest.published.numbers import number
from tests.loadtest.published.results import Figure, Result, load


@dataclass(frozen=True)
class Claim:
    """A piece of a page's text.

    Attributes:
        source: name of the JSON.
        text: with ``{}`` for each cell.
        cells: what stands there; they are given an empty key.
    """

    source: str
    text: str
    cells: Sequence[Cell]

    def rendered(self) -> str:
        """As it must stand on the page, on one line and without bold."""
        return self.text.format(*(cell(load(self.source), "") for cell in self.cells))


def value(function: Callable[[Result], float], digits: int = 0) -> Cell:
    """A number that is computed."""
    return lambda result, _: number(function(result), digits)


def ratio_alone(metric: str, ours: str, theirs: str, digits: int = 2) -> Cell:
    """Of the samples of the same repeats, without its interval and its ×."""
    return value(lambda result: result.paired_ratio(metric, ours, theirs).value, digits)


def per_cent_above(metric: str, ours: str, theirs: str, digits: int = 0) -> Cell:
    """How much more, of the samples of the same repeats; less is shown without its minus."""
    return value(
        lambda result: abs(100 * (result.paired_ratio(metric, ours, theirs).value - 1)), digits
    )


def ends_in_per_cent(metric: str, ours: str, theirs: str) -> list[Cell]:
    """Both ends of an interval, how far they are from one, the nearer first."""

    def ends(result: Result) -> list[float]:
        found = result.ratio(metric, ours, theirs)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        return sorted(abs(100 * (end - 1)) for end in (found.low, found.high))

    return [value(lambda result: ends(result)[0]), value(lambda result: ends(result)[1])]


def span(
    function: Callable[[Result], Sequence[float]], digits: int = 0, *, scale: float = 1
) -> list[Cell]:
    """The least and the most of several."""
    return [
        value(lambda result: scale * min(function(result)), digits),
        value(lambda result: scale * max(function(result)), digits),
    ]


def means(metric: str, arms: Sequence[str]) -> Callable[[Result], list[float]]:
    """Of several arms."""
    return lambda result: [found.value for arm in arms if (found := result.mean(arm, metric))]


def samples(metric: str, arms: Sequence[str]) -> Callable[[Result], list[float]]:
    """All of several arms."""
    return lambda result: [x for arm in arms for x in result.samples(arm, metric)]


def half_width(figure: Figure) -> float:
    """Of the interval."""
    assert figure.low is not None
    assert figure.high is not None
    return (figure.high - figure.low) / 2
