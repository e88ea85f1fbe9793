"""Which θ_F is in force (paper §3.3, stage 1): the configured one, or one that follows the load.

Adaptive θ_F tightens fast and relaxes slowly, as congestion control does. A pure function from a
state and one reading to the next state; the reclamation backend takes a reading per check.

    F > θ + 0.10, or the pool nearly dry and F > θ_min     θ ← max(θ_min, θ / 2)
    F < θ + 0.05 and the pool not dry, 16 checks in a row  θ ← min(θ_max, θ + 0.02) per check
    between                                                θ stays, the count starts anew

The gap between 0.05 and 0.10 is the hysteresis: F, which hovers at θ while relocation is at work,
moves it neither way.
"""

from __future__ import annotations

from dataclasses import dataclass

SPIKE = 0.10
"""F above θ_F by more than this: relocation does not keep up with what the threshold lets pass."""
CALM = 0.05
"""F above θ_F by less than this is calm."""
DRY_RATIO = 0.10
"""Free blocks / total blocks at or below which the next admission or decode may find none."""
NUM_CALM_CHECKS = 16
"""Calm checks in a row before the threshold relaxes."""
RELAX_STEP = 0.02
"""By how much it relaxes per check then."""


@dataclass(frozen=True)
class Bounds:
    """Between which values θ_F may move, 0 <= low <= high < 1."""

    low: float
    high: float

    def clip(self, theta_f: float) -> float:
        """The nearest allowed value."""
        return min(self.high, max(self.low, theta_f))


@dataclass(frozen=True)
class Threshold:
    """θ_F in force, and for how many checks in a row it was calm."""

    theta_f: float
    num_calm: int = 0


def next_threshold(
    now: Threshold, bounds: Bounds, waste_ratio: float, free_ratio: float
) -> Threshold:
    """θ_F for the next check; pure.

    Args:
        now: the present one.
        bounds: limits of the result.
        waste_ratio: F (Eq. 1), before this check's relocations.
        free_ratio: free blocks / total blocks.
    """
    dry = free_ratio <= DRY_RATIO
    if waste_ratio > now.theta_f + SPIKE or (dry and waste_ratio > bounds.low):
        return Threshold(bounds.clip(now.theta_f / 2))
    if dry or waste_ratio >= now.theta_f + CALM:
        return Threshold(bounds.clip(now.theta_f))
    if now.num_calm + 1 < NUM_CALM_CHECKS:
        return Threshold(bounds.clip(now.theta_f), now.num_calm + 1)
    return Threshold(bounds.clip(now.theta_f + RELAX_STEP), NUM_CALM_CHECKS)
