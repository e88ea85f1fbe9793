"""Adaptive θ_F: fast down, slow up, bounded, still inside its hysteresis."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.adaptive_threshold import CONFIGS, LOADS, Simulation
from tests.core_models import kill, make_layer, make_request
from vtoken.threshold import (
    CALM,
    DRY_RATIO,
    NUM_CALM_CHECKS,
    RELAX_STEP,
    SPIKE,
    Bounds,
    Threshold,
    next_threshold,
)

BOUNDS = Bounds(0.05, 0.5)
AMPLE = 0.5


def trace(
    readings: Iterable[tuple[float, float]], start: float = 0.25, bounds: Bounds = BOUNDS
) -> list[float]:
    """θ_F after each ``(F, free ratio)``."""
    now, thetas = Threshold(start), []
    for waste_ratio, free_ratio in readings:
        now = next_threshold(now, bounds, waste_ratio, free_ratio)
        thetas.append(now.theta_f)
    return thetas


def test_spike_brings_the_threshold_down_within_three_checks() -> None:
    """From 0.25 to its floor: 0.125, 0.0625, 0.05."""
    assert trace([(0.6, AMPLE)] * 4) == [0.125, 0.0625, 0.05, 0.05]


def test_pool_that_runs_dry_counts_as_a_spike() -> None:
    """Waste that nobody minds in an ample pool is too much in an empty one."""
    assert trace([(0.2, AMPLE)]) == [0.25]
    assert trace([(0.2, DRY_RATIO)]) == [0.125]
    assert trace([(0.04, DRY_RATIO)] * 40) == [0.25] * 40, "nothing left to gain, nothing to relax"


def test_calm_relaxes_slowly_and_only_after_a_while() -> None:
    """Not a step before the count is full, then one small step per check."""
    thetas = trace([(0.1, AMPLE)] * (NUM_CALM_CHECKS + 2))
    assert thetas[: NUM_CALM_CHECKS - 1] == [0.25] * (NUM_CALM_CHECKS - 1)
    assert thetas[-1] == pytest.approx(0.25 + 3 * RELAX_STEP)


def test_hysteresis_holds_still() -> None:
    """F that wanders between the two marks moves nothing, and one such check restarts the count."""
    rng = random.Random(0)
    wander = [(0.25 + rng.uniform(CALM, SPIKE), AMPLE) for _ in range(200)]
    assert set(trace(wander)) == {0.25}
    interrupted = [(0.1, AMPLE)] * (NUM_CALM_CHECKS - 1) + [(0.32, AMPLE)]
    assert set(trace(interrupted * 5)) == {0.25}


def test_threshold_does_not_oscillate_with_the_waste_it_causes() -> None:
    """Relocation keeps F just below θ_F: a closed loop settles at the upper bound and stays."""
    now, thetas = Threshold(0.05), []
    for _ in range(200):
        now = next_threshold(now, BOUNDS, now.theta_f + 0.02, AMPLE)
        thetas.append(now.theta_f)
    assert thetas == sorted(thetas)
    assert set(thetas[-50:]) == {BOUNDS.high}


def test_burst_trace_tightens_and_recovers() -> None:
    """Calm, a burst, calm: down at once, up again in the end."""
    readings = [*[(0.3, AMPLE)] * 40, *[(0.7, 0.02)] * 6, *[(0.05, AMPLE)] * 60]
    thetas = trace(readings, start=0.5)
    assert thetas[39] == 0.5
    assert thetas[45] == 0.05
    assert thetas[-1] == 0.5


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=80),
    st.floats(0, 0.99),
    st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(sorted),
)
def test_threshold_never_leaves_its_bounds(
    readings: list[tuple[float, float]], start: float, limits: list[float]
) -> None:
    """Whatever the readings, and wherever it starts."""
    bounds = Bounds(*limits)
    thetas = trace(readings, start, bounds)
    assert all(bounds.low <= theta <= bounds.high for theta in thetas)
    for before, after in itertools.pairwise(thetas):
        assert after - before <= RELAX_STEP + 1e-9


def test_layer_plans_by_the_threshold_in_force() -> None:
    """F = 0.4 is below the configured θ_F: fixed never moves, adaptive does within a few checks."""
    planned = {}
    for mode in ("fixed", "adaptive"):
        layer, pool = make_layer(policy="none", theta_f=0.45, theta_f_mode=mode)
        kv = make_request(layer, pool, num_tokens=20)
        kill(layer, kv, [1, 2, 5, 6, 9, 10, 13, 14])
        assert layer.occupancy.waste_ratio == pytest.approx(0.4)
        pool.allocate(pool.num_free_blocks() - 3)
        planned[mode] = sum(len(layer.plan_relocations([(kv, 20)])) for _ in range(3))
        assert (layer.pool_state()["effective_theta_f"] == 0.45) == (mode == "fixed")
    assert planned == {"fixed": 0, "adaptive": 1}


def test_patch_of_theta_f_starts_anew_and_others_do_not() -> None:
    """An operator's value takes effect at once; an unrelated change does not undo adaptation."""
    layer, pool = make_layer(policy="none", theta_f=0.4, theta_f_mode="adaptive")
    kv = make_request(layer, pool, num_tokens=20)
    kill(layer, kv, [1, 2, 3, 5, 6, 7, 9, 10, 11])
    layer.plan_relocations([(kv, 20)])
    pool.allocate(pool.num_free_blocks() - 1)
    layer.plan_relocations([(kv, 20)])
    assert layer.reclamation.theta_f == pytest.approx(0.2)
    layer.control.patch({"max_source_blocks": 8})
    assert layer.reclamation.theta_f == pytest.approx(0.2)
    layer.control.patch({"theta_f": 0.3})
    assert layer.reclamation.theta_f == 0.3


@pytest.mark.parametrize("load", LOADS)
def test_adaptive_waits_like_the_lowest_fixed_threshold_and_moves_less(load: str) -> None:
    """Under bursts: waits within a tenth of those with θ_F = 0.05, at fewer copies."""
    results = {
        name: Simulation(CONFIGS[name], LOADS[load]).run()
        for name in ("fixed 0.05", "fixed 0.25", "adaptive")
    }
    adaptive, low, default = (results[n] for n in ("adaptive", "fixed 0.05", "fixed 0.25"))
    assert adaptive["mean_wait_steps"] <= 1.1 * low["mean_wait_steps"]
    assert adaptive["mean_wait_steps"] <= 0.6 * default["mean_wait_steps"]
    assert adaptive["moved_tokens"] <= 0.9 * low["moved_tokens"]
    assert adaptive["preempted"] == 0 < default["preempted"]
