"""The last moment before a preemption: early commits and urgent relocations, proven by oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.workloads import make_prompts

pytestmark = pytest.mark.engine

BLOCK_BYTES_FP32 = 16 * 45 * 1024
NUM_BLOCKS = 64
MAX_LOGPROB_ERROR = 2e-3
TRIGGERS = {
    "early": {"theta_f": 0.1, "low_watermark_ratio": 1.0},
    "urgent": {"theta_f": 0.95, "low_watermark_ratio": 0.0},
}
"""``urgent``: thresholds that ordinary relocation never reaches, so only pressure moves tokens."""


def make_spec(trigger: str, **extra: Any) -> dict[str, Any]:
    """Eight requests of 240 + 64 tokens, budget 96, in 64 blocks: live tokens of seven fit, the
    holes of four do not. One block of headroom, or admission itself keeps the pressure away."""
    return {
        "vtoken": {
            "mode": "lazy",
            "policy": "random",
            "budget_tokens": 96,
            "recent_tokens": 8,
            "evict_interval_tokens": 8,
            "max_source_blocks": 6,
            "headroom_blocks": 1,
            "record_evictions": True,
            "verify": "full",
            **TRIGGERS[trigger],
        },
        "engine": {
            "dtype": "float32",
            "max_model_len": 512,
            "kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES_FP32,
        },
        "workloads": [
            {
                "name": "pressure",
                "prompts": make_prompts((240,) * 8, step=41),
                "max_tokens": 64,
                "logprobs": 5,
            }
        ],
        **extra,
    }


@pytest.fixture(scope="module")
def oracle(model_path: str) -> DenseOracle:
    """The reference model."""
    return DenseOracle(model_path)


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_preemption_is_avoided_and_outputs_stay_exact(
    run_arm: RunArm, oracle: DenseOracle, trigger: str
) -> None:
    """No request is preempted although the pool is full, and every token is the oracle's."""
    result = run_arm(make_spec(trigger))["pressure"]
    counters = result["counters"]
    assert counters["preemptions_total"] == 0
    num_urgent = counters["urgent_relocations_total"]
    num_early = counters["preemptions_avoided_total"] - num_urgent
    assert (num_early if trigger == "early" else num_urgent) >= 3, counters
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert result["free_blocks"] == result["total_blocks"]
