"""The last moment before a preemption: early commits and urgent relocations, proven by oracle.

One engine with a small pool serves this file and others that need one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import BYTES_PER_TOKEN, ensure_tiny_model
from tests.engine.workloads import make_prompts, on_tiny_model

pytestmark = pytest.mark.engine

NUM_BLOCKS = 64
LONG_PROMPT = 900
MAX_LOGPROB_ERROR = 2e-3
EAGER = {"theta_f": 0.1, "low_watermark_ratio": 1.0}
FEW = {"headroom_blocks": 1, "max_source_blocks": 6}
EARLY = {**EAGER, **FEW}
URGENT = {"theta_f": 0.95, "low_watermark_ratio": 0.0, **FEW}
"""Thresholds that ordinary relocation never reaches, so only pressure moves tokens."""
RATIOS = (0.3, 0.1)
"""Of ``evict_free_ratio``. Not 0: with no more than one free block as destination, packing can get
stuck between blocks that are just over half full, and then vLLM preempts although the live tokens
would fit."""
ROOMY = {**EAGER, "headroom_blocks": None, "max_source_blocks": None, "evict_free_ratio": None}


def make_spec() -> dict[str, Any]:
    """Eight requests of 240 + 64 tokens, budget 96, in 64 blocks: live tokens of seven fit, the
    holes of four do not. One block of headroom, or admission itself keeps the pressure away.

    Then three such requests and a prompt that fills nine tenths of the pool; at last the first load
    again, with copies that fail.
    """
    eight = {"prompts": make_prompts((240,) * 8, step=41), "max_tokens": 64, "logprobs": 5}
    long = {**eight, "prompts": [*make_prompts((240,) * 3, step=41), [300, LONG_PROMPT]]}
    workloads = [
        {**eight, "name": "early", "patch": EARLY},
        {**eight, "name": "urgent", "patch": URGENT},
        *(
            {**eight, "name": f"ratio {ratio}", "patch": {**EARLY, "evict_free_ratio": ratio}}
            for ratio in RATIOS
        ),
        *(
            {**long, "name": name, "patch": {**ROOMY, "evict_during_prefill": within}}
            for name, within in (("long", True), ("long waits", False))
        ),
        {**eight, "name": "flaky", "patch": URGENT, "fault": ["flaky_copy", [0]]},
    ]
    return {
        **on_tiny_model(
            dtype="float32",
            max_model_len=1000,
            kv_cache_memory_bytes=NUM_BLOCKS * 16 * 2 * BYTES_PER_TOKEN,
        ),
        "vtoken": {
            "mode": "lazy",
            "policy": "random",
            "budget_tokens": 96,
            "recent_tokens": 8,
            "evict_interval_tokens": 8,
            "record_evictions": True,
            "verify": "full",
        },
        "workloads": workloads,
    }


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(str(ensure_tiny_model()))


@pytest.mark.parametrize("trigger", ["early", "urgent"])
def test_preemption_is_avoided_and_outputs_stay_exact(
    run_arm: RunArm, oracle: DenseOracle, trigger: str
) -> None:
    """No request is preempted although the pool is full, and every token is the oracle's."""
    result = run_arm(make_spec())[trigger]
    counters = result["counters"]
    assert counters["preemptions_total"] == 0
    num_urgent = counters["urgent_relocations_total"]
    num_early = counters["preemptions_avoided_total"] - num_urgent
    assert (num_early if trigger == "early" else num_urgent) >= 3, counters
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 10, "the evictions must matter"
    assert result["free_blocks"] == result["total_blocks"]
