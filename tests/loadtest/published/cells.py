"""What may stand in a cell of a table: a function of a result and of the row's key.

Names of arms are templates, in which ``{}`` stands for the key of the row: ``stock@{}``.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.loadtest.published import results
from tests.loadtest.published.numbers import bold, interval, number
from tests.loadtest.published.results import Result

Cell = Callable[[Result, str], str]


def mean(
    metric: str,
    digits: int = 0,
    arm: str = "{}",
    *,
    scale: float = 1,
    unit: str = "",
    nearest: int = 1,
    with_interval: bool = True,
    missing: str | None = None,
) -> Cell:
    """Mean and interval; the interval is left out where both ends round to the same.

    Args:
        metric: of the arm.
        digits: after the point.
        arm: its name, a template.
        scale: factor from the JSON's unit to the table's: 100 for per cent, 1e-3 for seconds.
        unit: written after the mean: `` %``.
        nearest: see :func:`number`.
        with_interval: whether the interval is shown.
        missing: stands where the arm has no such metric; None: it must have it.
    """

    def cell(result: Result, key: str) -> str:
        name = arm.format(key)
        figure = result.mean(name, metric)
        if figure is None:
            assert missing is not None, f"{result.name}: {name} has no {metric}"
            return missing
        figure = figure.times(scale)
        shown = number(figure.value, digits, nearest=nearest) + unit
        return shown + interval(figure, digits, nearest=nearest) if with_interval else shown

    return cell


def plain(
    metric: str,
    digits: int = 0,
    arm: str = "{}",
    *,
    scale: float = 1,
    nearest: int = 1,
    missing: str | None = None,
) -> Cell:
    """A mean without its interval; arguments are those of :func:`mean`."""
    return mean(
        metric, digits, arm, scale=scale, nearest=nearest, with_interval=False, missing=missing
    )


def percent(metric: str, digits: int = 1, arm: str = "{}") -> Cell:
    """A share in per cent: ``67.2 % (66.6 … 67.5)``."""
    return mean(metric, digits, arm, scale=100, unit=" %")


def ratio(metric: str, theirs: str, ours: str = "{}", digits: int = 2) -> Cell:
    """``× 1.27 (1.26 … 1.30)`` as the scenario compared them; empty where it did not."""

    def cell(result: Result, key: str) -> str:
        figure = result.ratio(metric, ours.format(key), theirs.format(key))
        return "" if figure is None else times(figure, digits)

    return cell


def paired_ratio(metric: str, theirs: str, ours: str = "{}", digits: int = 2) -> Cell:
    """The same from the samples of the same repeats; empty where an arm meets itself."""

    def cell(result: Result, key: str) -> str:
        names = ours.format(key), theirs.format(key)
        same = names[0] == names[1]
        return "" if same else times(result.paired_ratio(metric, *names), digits)

    return cell


def beyond(metric: str, theirs: str, ours: str = "{}", digits: int = 3) -> Cell:
    """``+0.036 (0.005 … 0.071)``: mean difference in the same cases; empty against itself."""

    def cell(result: Result, key: str) -> str:
        names = ours.format(key), theirs.format(key)
        if names[0] == names[1]:
            return ""
        found = results.difference(result, metric, *names)
        sign = "+" if found.value > 0 else ""
        return f"{sign}{number(found.value, digits)}{interval(found, digits)}"

    return cell


def times(figure: results.Figure, digits: int = 2) -> str:
    """``× 1.27 (1.26 … 1.30)``."""
    return f"× {number(figure.value, digits)}{interval(figure, digits)}"


def extremes(metric: str, arm: str = "{}") -> Cell:
    """Of whole numbers, the least and the most of any repeat: ``3 to 4``, or ``3``."""

    def cell(result: Result, key: str) -> str:
        samples = result.samples(arm.format(key), metric)
        low, high = number(min(samples)), number(max(samples))
        return low if low == high else f"{low} to {high}"

    return cell


def detail(*path: str) -> Cell:
    """A whole number anywhere in the JSON; parts of the path are templates."""

    def cell(result: Result, key: str) -> str:
        found = result.data
        for part in path:
            found = found[part.format(key)]
        return number(float(found))  # type: ignore[arg-type]

    return cell


def joined(separator: str, *cells: Cell) -> Cell:
    """Several in one: ``0.97 / 0.45``."""
    return lambda result, key: separator.join(cell(result, key) for cell in cells)


def marked(cell: Cell) -> Cell:
    """In bold, but for its interval."""
    return lambda result, key: bold(cell(result, key))


def of(source: str, cell: Cell) -> Cell:
    """Of another file than the table's."""
    return lambda _, key: cell(results.load(source), key)
