"""Aborts, preemptions, prefix sharing and policy switches in a tight pool, fully verified."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.tiny_model import BYTES_PER_TOKEN
from tests.engine.workloads import on_tiny_model

pytestmark = pytest.mark.engine

NUM_REQUESTS = 80


def make_spec() -> dict[str, Any]:
    """A pool of 90 blocks, chunked prefill, prefix cache, everything verified."""
    stress = {
        "num_requests": NUM_REQUESTS,
        "concurrency": 14,
        "seed": 1,
        "changes": [{"policy": p} for p in ("none", "streaming_llm", "random")],
        "preempt_ratio": 0.03,
    }
    return {
        **on_tiny_model(
            dtype="bfloat16",
            kv_cache_memory_bytes=90 * 16 * BYTES_PER_TOKEN,
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=16,
            enable_prefix_caching=True,
        ),
        "vtoken": {
            "mode": "lazy",
            "policy": "random",
            "budget_tokens": 80,
            "recent_tokens": 8,
            "evict_interval_tokens": 8,
            "theta_f": 0.1,
            "low_watermark_ratio": 0.8,
            "verify": "full",
        },
        "workloads": [{"name": "stress", "stress": stress}],
    }


def test_nothing_leaks(run_arm: RunArm) -> None:
    """After finishes, aborts and preemptions every block is free and every table is gone."""
    result = run_arm(make_spec())["stress"]
    assert result["free_blocks"] == result["total_blocks"]
    assert result["num_tables"] == 0


def test_aborts_free_their_blocks_within_two_steps(run_arm: RunArm) -> None:
    """Also where the abort arrives while the step computes that sends the request's copies."""
    steps = run_arm(make_spec())["stress"]["release_steps"]
    assert len(steps) >= 4
    assert max(steps) <= 2


def test_requests_finish_in_full(run_arm: RunArm) -> None:
    """A request that was not aborted delivers every token it asked for."""
    result = run_arm(make_spec())["stress"]
    assert all(wanted == delivered for wanted, delivered in result["finished"])
    assert len(result["finished"]) + sum(result["aborted"].values()) == NUM_REQUESTS


def test_every_phase_was_hit(run_arm: RunArm) -> None:
    """Commits, rollbacks (aborts between plan and commit), preemptions and aborts happened."""
    result = run_arm(make_spec())["stress"]
    counters = result["counters"]
    assert counters["relocations_total/committed"] >= 50
    assert counters["relocations_total/rolled_back"] >= 3
    assert counters["preemptions_total"] >= 3
    assert result["aborted"]["in_flight"] >= 3
    assert result["aborted"]["random"] >= 1


def test_freed_blocks_serve_other_requests(run_arm: RunArm) -> None:
    """Blocks given up by a running request are taken by others while it still runs."""
    assert run_arm(make_spec())["stress"]["blocks_passed_on"] >= 20


def test_no_invariant_was_violated(run_arm: RunArm) -> None:
    """verify=full checked every row against its table and every relocation's bytes."""
    counters = run_arm(make_spec())["stress"]["counters"]
    assert counters["invariant_checks_total/I2"] >= 1000
    assert counters["invariant_checks_total/I1"] >= 50
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_violations_total/{invariant}"] == 0
