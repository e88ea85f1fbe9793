"""Intervals and sample sizes, for few and noisy repeats.

Means and ratios get bootstrap intervals. With five repeats a plain percentile bootstrap covers
far less than it says, so its percentiles are widened until the width is that of Student's t
(Hesterberg 2015, "expanded percentile"). Below five there are too few different resamples for
that, and Student's t is used itself. Ratios are averaged in logarithms over pairs: what slows both
arms of a pair down cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
MIN_BOOTSTRAP = 5
"""Samples below which intervals are Student's: resamples of four never reach the wide tails."""
POWER = 0.8

Values = Sequence[float] | NDArray[np.float64]

_T_SMALL = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's 97.5 % quantile for 1 to 9 degrees of freedom; above, a series is exact to 1e-3."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval; the interval is ``None`` for one sample."""

    value: float
    low: float | None
    high: float | None

    @property
    def interval(self) -> list[float] | None:
        """``[low, high]``, or ``None`` where one sample cannot say."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def estimate_mean(samples: Values, *, seed: int = 0) -> Estimate:
    """Mean of independent repeats with its interval.

    Raises:
        ValueError: there is no sample.
    """
    values = np.asarray(samples, np.float64)
    if not len(values):
        raise ValueError("no samples")
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, None, None)
    if len(values) < MIN_BOOTSTRAP:
        half = student_quantile(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
        return Estimate(mean, mean - float(half), mean + float(half))
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(values), (NUM_RESAMPLES, len(values)))
    means = values[picks].mean(axis=1)
    tail = expanded_tail(len(values))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high))


def estimate_ratio(ours: Values, theirs: Values, *, seed: int = 0) -> Estimate:
    """Geometric mean of ``ours / theirs`` over pairs, with its interval.

    Raises:
        ValueError: unequal lengths, no pairs, or a value that is not positive.
    """
    logs = log_ratios(ours, theirs)
    found = estimate_mean(logs, seed=seed)
    low, high = (None if x is None else math.exp(x) for x in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high)


def log_ratios(ours: Values, theirs: Values) -> NDArray[np.float64]:
    """``log(ours / theirs)`` of each pair.

    Raises:
        ValueError: unequal lengths or a value that is not positive.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"pairs need equal numbers of samples: {len(a)} and {len(b)}")
    if not (np.all(a > 0) and np.all(b > 0)):
        raise ValueError("ratios need positive samples")
    return np.asarray(np.log(a) - np.log(b), np.float64)


def spread(ours: Values, theirs: Values) -> float:
    """Standard deviation of the log-ratios over pairs: 0.05 means about 5 %."""
    return float(np.std(log_ratios(ours, theirs), ddof=1))


def pairs_needed(spread_ratio: float, difference_ratio: float = 0.05) -> int:
    """Pairs with which a difference is found in 80 % of experiments, at 95 % confidence.

    Args:
        spread_ratio: of the pairs, see :func:`spread`.
        difference_ratio: the relative difference to find.
    """
    normal = NormalDist()
    z = normal.inv_cdf((1 + CONFIDENCE) / 2)
    needed = ((z + normal.inv_cdf(POWER)) * spread_ratio / difference_ratio) ** 2
    return max(2, math.ceil(needed + z * z / 2 - 1e-9))  # Guenther's correction for Student's t


def expanded_tail(num_samples: int) -> float:
    """Percentile at which a bootstrap of so many samples is cut off on either side."""
    t = student_quantile(num_samples - 1)
    return NormalDist().cdf(-math.sqrt(num_samples / (num_samples - 1)) * t)


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t with ``degrees`` of freedom, at least 1."""
    if degrees <= len(_T_SMALL):
        return _T_SMALL[degrees - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / degrees ** (i + 1) for i, term in enumerate(terms))


def percentile(values: Values, percent: float) -> float:
    """Linear between the two nearest values, as numpy and ``vllm bench serve`` do; 0 of none."""
    return float(np.percentile(values, percent)) if len(values) else 0.0
