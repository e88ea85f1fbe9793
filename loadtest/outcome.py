"""Results of a scenario: samples per arm and metric, comparisons, and the JSON they become."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.statistics import estimate_mean, estimate_ratio, pairs_needed, spread

Samples = dict[str, list[float]]

_DIGITS = 6


@dataclass(frozen=True)
class Comparison:
    """``ours / theirs`` of one metric, over pairs of repeats.

    Attributes:
        metric: in both arms.
        ours, theirs: names of arms.
    """

    metric: str
    ours: str
    theirs: str

    @property
    def name(self) -> str:
        """Key in the JSON."""
        return f"{self.metric}: {self.ours} / {self.theirs}"


@dataclass
class Outcome:
    """What a scenario measured.

    Attributes:
        arms: name to metric to one sample per repeat, in the order of the repeats; NaN where a
            repeat could not say.
        comparisons: to be made.
        config: what was sent to what, as plain data.
        details: anything else worth keeping, as plain data.
        not_measured: sentences.
    """

    arms: dict[str, Samples] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)

    def add(self, arm: str, metrics: Mapping[str, float]) -> None:
        """Add one repeat of an arm; a metric that it lacks is NaN there: pairs stay pairs."""
        samples = self.arms.setdefault(arm, {})
        count = max(map(len, samples.values()), default=0)
        for name in dict.fromkeys([*samples, *metrics]):  # in this order in files and tables
            values = samples.setdefault(name, [math.nan] * count)
            values.append(float(metrics.get(name, math.nan)))

    def compare(self, ours: str, theirs: str, metrics: Sequence[str]) -> None:
        """Ask for the ratios of these metrics."""
        self.comparisons += [Comparison(metric, ours, theirs) for metric in metrics]


def describe_arms(arms: Mapping[str, Samples]) -> dict[str, Any]:
    """``{arm: {metric: {mean, ci95, samples}}}``."""
    return {
        arm: {metric: _described(samples) for metric, samples in metrics.items()}
        for arm, metrics in arms.items()
    }


def describe_comparisons(outcome: Outcome) -> dict[str, Any]:
    """``{name: {ratio, ci95, pairs, spread, pairs_for_5_percent}}`` of those that can be made.

    A ratio needs equally many samples in both arms, all above zero; a repeat in which either arm
    could not say is no pair.
    """
    found = {}
    for comparison in outcome.comparisons:
        ours = outcome.arms.get(comparison.ours, {}).get(comparison.metric, [])
        theirs = outcome.arms.get(comparison.theirs, {}).get(comparison.metric, [])
        if len(ours) != len(theirs):
            continue
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not math.isnan(a + b)]
        if not pairs or min(map(min, pairs)) <= 0:
            continue
        ours, theirs = map(list, zip(*pairs, strict=True))
        ratio = estimate_ratio(ours, theirs)
        entry: dict[str, Any] = {
            "ratio": _rounded(ratio.value),
            "ci95": _rounded_list(ratio.interval),
            "pairs": len(ours),
        }
        if len(ours) > 1:
            deviation = spread(ours, theirs)
            entry |= {
                "spread": _rounded(deviation),
                "pairs_for_5_percent": pairs_needed(deviation),
            }
        found[comparison.name] = entry
    return found


def _described(samples: Sequence[float]) -> dict[str, Any]:
    known = [value for value in samples if not math.isnan(value)]
    written = [None if math.isnan(value) else _rounded(value) for value in samples]
    if not known:
        return {"mean": None, "ci95": None, "samples": written}
    estimate = estimate_mean(known)
    return {
        "mean": _rounded(estimate.value),
        "ci95": _rounded_list(estimate.interval),
        "samples": written,
    }


def _rounded(value: float) -> float:
    """Six significant digits: more was never measured."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else value


def _rounded_list(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else [_rounded(value) for value in values]
