"""The published results are what their own samples say, so that no figure in them was typed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.statistics import MIN_BOOTSTRAP, estimate_mean, estimate_ratio
from tests.loadtest.published.results import FOLDER, Result, load

MEASURED = [
    path.stem
    for path in sorted(FOLDER.glob("*.json"))
    if {"scenario", "arms", "comparisons"} <= set(json.loads(path.read_text()))
]
ROUNDED = 2e-5
"""Of six significant digits, and of what was computed from more of them."""


def metrics(result: Result) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Arm, metric and what is said of it, where anything could be."""
    for arm, found in result.data["arms"].items():
        for metric, said in found.items():
            if said["mean"] is not None:
                yield arm, metric, said


def close(said: float, computed: float, size: float) -> bool:
    """Whether both are the same but for rounding of numbers of this size."""
    return math.isclose(said, computed, rel_tol=ROUNDED, abs_tol=ROUNDED * size)


@pytest.mark.parametrize("name", MEASURED)
def test_means_are_those_of_the_samples(name: str) -> None:
    """And lie in their interval, which lies within the samples wherever it is bootstrapped."""
    result = load(name)
    for arm, metric, said in metrics(result):
        samples = result.samples(arm, metric)
        size = max(map(abs, samples))
        assert close(said["mean"], sum(samples) / len(samples), size), f"{arm}, {metric}"
        if said["ci95"]:
            low, high = said["ci95"]
            slack = ROUNDED * size
            assert low - slack <= said["mean"] <= high + slack, f"{arm}, {metric}"
            if len(samples) >= MIN_BOOTSTRAP:
                assert min(samples) - slack <= low, f"{arm}, {metric}"
                assert high <= max(samples) + slack, f"{arm}, {metric}"


@pytest.mark.parametrize("name", MEASURED)
def test_ratios_are_those_of_the_pairs(name: str) -> None:
    """Geometric means over the repeats in which both arms could say."""
    result = load(name)
    for comparison, said in result.data["comparisons"].items():
        metric, _, arms = comparison.partition(": ")
        ours, theirs = result.pairs(metric, *arms.split(" / "))
        logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
        assert said["pairs"] == len(logs), comparison
        assert close(said["ratio"], math.exp(sum(logs) / len(logs)), 1), comparison


@pytest.mark.parametrize("name", MEASURED)
def test_intervals_are_what_the_statistics_give(name: str) -> None:
    """Of one metric of each arm and a few comparisons: all of them would take too long."""
    result = load(name)
    for arm in result.data["arms"]:
        said_of = [found for found in metrics(result) if found[0] == arm and found[2]["ci95"]]
        for _, metric, said in said_of[len(arm) % 7 :][:1]:
            samples = result.samples(arm, metric)
            expected = estimate_mean(samples).interval
            assert said["ci95"] == pytest.approx(
                expected, rel=ROUNDED, abs=ROUNDED * max(map(abs, samples))
            )
    for comparison, said in list(result.data["comparisons"].items())[::7]:
        metric, _, arms = comparison.partition(": ")
        expected = estimate_ratio(*result.pairs(metric, *arms.split(" / "))).interval
        assert said["ci95"] == (expected and pytest.approx(expected, rel=ROUNDED)), comparison


def test_all_scenarios_are_among_them() -> None:
    """Else nothing was checked; guidellm's has arms and no scenario."""
    assert len(MEASURED) >= 13
    assert Path(FOLDER / "guidellm.json").is_file()
