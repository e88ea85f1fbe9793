"""What reclamation is for: more requests at once in the same pool (paper §4.3)."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.tiny_model import BYTES_PER_TOKEN
from tests.engine.workloads import in_mode, make_prompts, on_tiny_model

pytestmark = pytest.mark.engine

NUM_BLOCKS = 200
NUM_REQUESTS = 12
NUM_PROMPT_TOKENS = 600
NUM_OUTPUT_TOKENS = 160
WARM_UP_STEPS = 16
MODES = ("naive", "lazy")


def make_spec() -> dict[str, Any]:
    """200 blocks of 16 tokens; 12 requests of 600 + 160 tokens; budget 256, random; both modes."""
    workload = {
        "name": "pressure",
        "prompts": make_prompts((NUM_PROMPT_TOKENS,) * NUM_REQUESTS, step=41),
        "max_tokens": NUM_OUTPUT_TOKENS,
    }
    return {
        **on_tiny_model(dtype="bfloat16", kv_cache_memory_bytes=NUM_BLOCKS * 16 * BYTES_PER_TOKEN),
        "vtoken": {
            "mode": "naive",
            "policy": "random",
            "budget_tokens": 256,
            "recent_tokens": 16,
            "evict_interval_tokens": 16,
            "theta_f": 0.2,
        },
        "workloads": [in_mode(mode, workload) for mode in MODES],
    }


def both(run_arm: RunArm) -> list[dict[str, Any]]:
    """The results in mode naive and lazy."""
    return [run_arm(make_spec())[f"{mode} pressure"] for mode in MODES]


def steady(result: dict[str, Any]) -> list[list[float]]:
    """Trace of the steady phase: past the first prefills, while the pool keeps others waiting."""
    trace: list[list[float]] = result["trace"]
    return [step for step in trace[WARM_UP_STEPS:] if step[1] > 0]


def test_lazy_keeps_more_requests_running(run_arm: RunArm) -> None:
    """At least 1.8 times as many requests run at once in the steady phase."""
    running = [median(step[0] for step in steady(r)) for r in both(run_arm)]
    assert running[1] >= 1.8 * running[0], running


def test_lazy_retains_fewer_blocks_per_request(run_arm: RunArm) -> None:
    """Blocks per running request are at most 0.55 of naive's."""
    per_request = [median(step[2] / step[0] for step in steady(r)) for r in both(run_arm)]
    assert per_request[1] <= 0.55 * per_request[0], per_request


def test_lazy_finishes_in_fewer_steps(run_arm: RunArm) -> None:
    """The whole load takes at most 0.75 of naive's engine steps."""
    steps = [r["counters"]["steps"] for r in both(run_arm)]
    assert steps[1] <= 0.75 * steps[0], steps


def test_every_request_finishes_in_full(run_arm: RunArm) -> None:
    """Pressure delays requests, it never shortens or loses one, and no block leaks."""
    for result in both(run_arm):
        assert [len(tokens) for tokens in result["tokens"]] == [NUM_OUTPUT_TOKENS] * NUM_REQUESTS
        assert result["free_blocks"] == result["total_blocks"]
