"""Figures in the running text of a page: found, and looked for in the results that are named there.

A figure is a ratio (``× 1.27``), or anything with an interval or a range (``49.5 (48.3 … 50.5)``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.loadtest.published import results
from tests.loadtest.published.numbers import number
from tests.loadtest.published.page import MARKED
from tests.loadtest.published.results import Figure, Result

_NUM = r"[+−]?\d{1,3}(?: \d{3})*(?:\.\d+)?"
_UNIT = r"(?: %| ms| s| nats)?"
_RANGE = re.compile(rf"(?P<low>{_NUM}){_UNIT} … (?P<high>{_NUM})(?P<unit>{_UNIT})")
_LAST = re.compile(rf"(?P<times>× )?(?P<sign>[+−] ?)?(?P<value>{_NUM})(?P<unit>{_UNIT})[^\d…]*$")
_RATIO = re.compile(rf"× ?(?P<value>{_NUM})")
_CODE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
_INVISIBLE = re.compile(r"\]\([^)]*\)|<!--.*?-->", re.S)
_SOURCE = re.compile(r"\(evaluation/(\w+)\.json\)")
_MINUTES = re.compile(
    r"\(evaluation/(?P<name>\w+)\.json\)(?:(?!\.json|```).)*?It took (?P<minutes>[\d.]+) minutes"
)


@dataclass(frozen=True)
class Section:
    """What is under one head of the second level.

    Attributes:
        title: the head.
        text: on one line, without rendered tables, code and targets of links.
        sources: names of the JSONs that it links to.
    """

    title: str
    text: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """A figure in a text.

    Attributes:
        text: as it stands there, for messages.
        value: of the mean or ratio; empty of a bare range.
        ends: of its interval or range, if it has one.
        is_ratio: whether a × stands before it.
        is_percent: whether a % stands behind it.
    """

    text: str
    value: str
    ends: tuple[str, str] | None
    is_ratio: bool
    is_percent: bool


def sections(page: str) -> Iterator[Section]:
    """Of a page, in order; what is above the first head has the title of the page."""
    seen = _CODE.sub("", MARKED.sub("", page))
    for part in re.split(r"^(?=##? )", seen, flags=re.M):
        title, _, rest = part.partition("\n")
        sources = tuple(dict.fromkeys(_SOURCE.findall(rest)))
        yield Section(title.lstrip("# "), flat(_INVISIBLE.sub("", rest)), sources)


def flat(text: str) -> str:
    """Without bold, on one line."""
    return re.sub(r"\s+", " ", text.replace("*", ""))


def figures(text: str) -> Iterator[Found]:
    """All of a text: intervals and ranges first, then ratios without any."""
    taken: set[int] = set()
    for found in _RANGE.finditer(text):
        before = text[: found.start()]
        mean = _LAST.search(before) if re.search(r"(\(|, )$", before) else None
        ends = found["low"], found["high"]
        if mean is None:
            yield Found(found[0], "", ends, False, found["unit"] == " %")
            continue
        taken.add(mean.start("value"))
        shown = f"{mean[0].lstrip()}{found[0]}"
        value = f"{(mean['sign'] or '').strip()}{mean['value']}"
        yield Found(shown, value, ends, bool(mean["times"]), mean["unit"] == " %")
    for found in _RATIO.finditer(text):
        if found.start("value") not in taken:
            yield Found(found[0], found["value"], None, True, False)


def without(text: str, pieces: Iterable[str]) -> str:
    """What is left of a text when these pieces are taken out."""
    for piece in pieces:
        text = text.replace(piece, " ; ")
    return text


def minutes(page: str) -> Iterator[tuple[str, str]]:
    """Name of a JSON and how long it took, as the page says."""
    for found in _MINUTES.finditer(flat(page)):
        yield found["name"], found["minutes"]


def is_in(found: Found, named: Iterable[Result]) -> bool:
    """Whether any of the results has it with its interval, rounded to as many digits.

    A ratio is one of the comparisons, or the inverse of one. Per cents are shares of arms, or
    what a ratio is above or below one. Other means are of arms, in the JSON's unit or, where that
    is milliseconds, in seconds. A bare range or ratio is in none: too many would do.
    """
    if not (found.value and found.ends):
        return False
    return any(_same(found, figure) for result in named for figure in _candidates(found, result))


def _candidates(found: Found, result: Result) -> Iterator[Figure]:
    ratios = [Figure(c["ratio"], *(c["ci95"] or ())) for c in result.data["comparisons"].values()]
    if found.is_ratio:
        yield from ratios
        yield from (_inverse(ratio) for ratio in ratios)
        return
    if found.is_percent:
        for ratio in ratios:
            yield _map(ratio, lambda x: 100 * (x - 1))
            yield _map(ratio, lambda x: 100 * (1 - x))
    scales = (100.0,) if found.is_percent else (1.0, 1e-3)
    for arm in result.data["arms"].values():
        for metric in arm.values():
            if metric["mean"] is not None:
                figure = Figure(metric["mean"], *(metric["ci95"] or ()))
                yield from (figure.times(scale) for scale in scales)


def _same(found: Found, figure: Figure) -> bool:
    if figure.low is None or figure.high is None or not _rounds_to(figure.value, found.value):
        return False
    assert found.ends
    pairs = [(figure.low, figure.high), (figure.high, figure.low)]
    return any(all(map(_rounds_to, pair, found.ends)) for pair in pairs)


def _rounds_to(value: float, text: str) -> bool:
    digits = len(text.partition(".")[2])
    return number(value, digits) == text.replace("+", "")


def _map(figure: Figure, function: Callable[[float], float]) -> Figure:
    ends = (None if end is None else function(end) for end in (figure.low, figure.high))
    return Figure(function(figure.value), *ends)


def _inverse(figure: Figure) -> Figure:
    return _map(figure, lambda x: 1 / x)


def load_all(names: Iterable[str]) -> list[Result]:
    """Those results that have arms and comparisons."""
    found = (results.load(name) for name in names)
    return [result for result in found if {"arms", "comparisons"} <= set(result.data)]
