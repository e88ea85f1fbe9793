"""Published results: means with intervals, and ratios, out of ``docs/evaluation/*.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loadtest.statistics import Estimate, estimate_mean, estimate_ratio

DOCS = Path(__file__).parents[3] / "docs"
FOLDER = DOCS / "evaluation"


@dataclass(frozen=True)
class Figure:
    """A mean or a ratio with the ends of its interval; they are None where one sample was taken."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, scale: float) -> Figure:
        """In another unit."""
        ends = (None if end is None else end * scale for end in (self.low, self.high))
        return Figure(self.value * scale, *ends)


@dataclass(frozen=True, eq=False)
class Result:
    """One JSON; equal to itself only, so that what is computed of it can be kept.

    Attributes:
        name: its file's, without ``.json``.
        data: as written.
    """

    name: str
    data: Mapping[str, Any]

    def metric(self, arm: str, metric: str) -> Mapping[str, Any] | None:
        """``{mean, ci95, samples}``; None where the arm has no such metric, or never could say.

        Raises:
            KeyError: there is no such arm.
        """
        found: Mapping[str, Any] | None = self.data["arms"][arm].get(metric)
        return None if found is None or found["mean"] is None else found

    def mean(self, arm: str, metric: str) -> Figure | None:
        """Mean of an arm's repeats; raises as :meth:`metric` does."""
        found = self.metric(arm, metric)
        return None if found is None else Figure(found["mean"], *(found["ci95"] or ()))

    def samples(self, arm: str, metric: str) -> list[float]:
        """Of the repeats that could say, in their order.

        Raises:
            KeyError: there is no such arm or metric.
        """
        found = self.data["arms"][arm][metric]["samples"]
        return [value for value in found if value is not None]

    def pairs(self, metric: str, ours: str, theirs: str) -> tuple[list[float], list[float]]:
        """Samples of both arms from the repeats in which both could say; raises as above."""
        both = (self.data["arms"][arm][metric]["samples"] for arm in (ours, theirs))
        known = [pair for pair in zip(*both, strict=True) if None not in pair]
        return [a for a, _ in known], [b for _, b in known]

    def ratio(self, metric: str, ours: str, theirs: str) -> Figure | None:
        """As the scenario compared them; None if it did not.

        Raises:
            KeyError: there is no such arm.
        """
        assert {ours, theirs} <= set(self.data["arms"]), f"{self.name}: {ours} / {theirs}"
        found = self.data["comparisons"].get(f"{metric}: {ours} / {theirs}")
        return None if found is None else Figure(found["ratio"], *(found["ci95"] or ()))

    def paired_ratio(self, metric: str, ours: str, theirs: str) -> Figure:
        """From the samples of the same repeats, for pairs that the scenario did not compare."""
        return of_estimate(estimate_ratio(*self.pairs(metric, ours, theirs)))


@cache
def difference(result: Result, metric: str, ours: str, theirs: str) -> Figure:
    """Mean difference in the same cases, which are the samples."""
    pairs = result.pairs(metric, ours, theirs)
    return of_estimate(estimate_mean([a - b for a, b in zip(*pairs, strict=True)]))


def of_estimate(estimate: Estimate) -> Figure:
    """The same numbers."""
    return Figure(estimate.value, estimate.low, estimate.high)


@cache
def load(name: str) -> Result:
    """``docs/evaluation/NAME.json``."""
    return Result(name, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
