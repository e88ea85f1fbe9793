"""Intervals cover what they say on known distributions, and sample sizes follow the spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.statistics import (
    estimate_mean,
    estimate_ratio,
    expanded_tail,
    log_ratios,
    pairs_needed,
    percentile,
    spread,
    student_quantile,
)

NUM_EXPERIMENTS = 300


@pytest.mark.parametrize(
    ("num_samples", "at_least"), [(3, 0.92), (4, 0.92), (5, 0.9), (10, 0.92), (30, 0.92)]
)
def test_interval_of_a_mean_covers_the_true_mean(num_samples, at_least):
    """About 95 % of intervals of normal samples hold the true mean, for few samples too."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(NUM_EXPERIMENTS):
        found = estimate_mean(rng.normal(10.0, 2.0, num_samples))
        covered += found.low <= 10.0 <= found.high
    assert at_least <= covered / NUM_EXPERIMENTS <= 0.99


def test_plain_percentiles_would_cover_too_little():
    """Five samples: the tails that are cut off are a twentieth of the usual 2.5 %."""
    assert expanded_tail(5) < 0.002
    assert expanded_tail(1000) == pytest.approx(0.025, abs=0.001)


def test_interval_of_a_ratio_covers_the_true_ratio():
    """Pairs with a common disturbance of 30 %: only what is not common counts."""
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(NUM_EXPERIMENTS):
        common = rng.normal(0, 0.3, 8)
        ours = 0.8 * np.exp(common + rng.normal(0, 0.05, 8))
        theirs = np.exp(common + rng.normal(0, 0.05, 8))
        found = estimate_ratio(ours, theirs)
        covered += found.low <= 0.8 <= found.high
        assert found.value == pytest.approx(0.8, rel=0.2)
    assert 0.9 <= covered / NUM_EXPERIMENTS <= 0.99


def test_ratio_does_not_depend_on_which_arm_is_called_ours():
    """The ratio the other way round is the reciprocal, interval included."""
    ours, theirs = [1.0, 2.0, 4.0, 3.0], [2.0, 2.5, 3.0, 7.0]
    one, other = estimate_ratio(ours, theirs), estimate_ratio(theirs, ours)
    assert one.value == pytest.approx(1 / other.value)
    assert one.value == pytest.approx(math.exp(np.mean(np.log(np.divide(ours, theirs)))))


def test_equal_samples_have_an_interval_of_width_zero():
    """What never varies is known exactly."""
    assert estimate_mean([3.0] * 5).interval == [3.0, 3.0]


def test_one_sample_has_no_interval():
    """Its spread is unknown."""
    assert estimate_mean([3.0]).interval is None
    assert estimate_ratio([3.0], [2.0]).interval is None
    assert estimate_ratio([3.0], [2.0]).value == pytest.approx(1.5)


def test_impossible_inputs_are_refused():
    """No samples, unequal pairs, and ratios with zero."""
    with pytest.raises(ValueError, match="no samples"):
        estimate_mean([])
    with pytest.raises(ValueError, match="equal numbers of samples: 2 and 1"):
        log_ratios([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        estimate_ratio([0.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("spread_ratio", "pairs"), [(0.02, 4), (0.05, 10), (0.10, 34)])
def test_pairs_needed_for_five_percent(spread_ratio, pairs):
    """A difference of 5 % at a spread of 2, 5 and 10 %."""
    assert pairs_needed(spread_ratio) == pairs


def test_pairs_needed_finds_the_difference_as_often_as_promised():
    """With so many pairs, intervals exclude 1 in about 80 % of experiments."""
    rng = np.random.default_rng(3)
    num_pairs = pairs_needed(0.05)
    found = 0
    for _ in range(NUM_EXPERIMENTS):
        logs = rng.normal(math.log(1.05), 0.05, num_pairs)
        found += estimate_mean(logs).low > 0
    assert 0.7 <= found / NUM_EXPERIMENTS <= 0.93


def test_spread_is_that_of_the_log_ratios():
    """Common factors of a pair drop out."""
    assert spread([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == pytest.approx(0.0)
    assert spread([1.0, math.e], [1.0, 1.0]) == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (4, 2.7764), (10, 2.2281), (15, 2.1314), (30, 2.0423)]
)
def test_student_quantile(degrees, quantile):
    """Values of the printed tables, to three digits."""
    assert student_quantile(degrees) == pytest.approx(quantile, abs=1e-3)


def test_percentile_of_nothing_is_zero():
    """A run without a gap between tokens has no ITL."""
    assert percentile([], 99) == 0.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
