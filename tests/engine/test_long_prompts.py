"""Eviction between the chunks of a prefill: exact, and room for prompts larger than the pool's
free part."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import test_pressure
from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.test_pressure import MAX_LOGPROB_ERROR
from tests.engine.tiny_model import ensure_tiny_model
from tests.engine.workloads import EVICTING, make_prompts, make_workload, on_tiny_model

pytestmark = pytest.mark.engine

POLICIES = ("streaming_llm", "random", "h2o")


def make_chunked_spec() -> dict[str, Any]:
    """Prompts of up to 480 tokens in steps of at most 128 tokens, in fp32, ample pool. At last
    nothing is evicted: the pool is ample, or the policy is none."""
    prompts = make_prompts((180, 333, 480))
    ample = {"policy": "random", "evict_free_ratio": 0.5}
    return {
        **on_tiny_model(dtype="float32", max_num_batched_tokens=128),
        "vtoken": {
            **EVICTING,
            "mode": "lazy",
            "budget_tokens": 96,
            "evict_interval_tokens": 8,
            "evict_during_prefill": True,
            "verify": "full",
        },
        "workloads": [
            *(make_workload(policy, 32, prompts=prompts) for policy in POLICIES),
            make_workload("random", 24, prompts=prompts, name="ample", patch=ample),
            make_workload("none", 24, prompts=prompts),
        ],
    }


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(str(ensure_tiny_model()))


@pytest.mark.parametrize("policy", POLICIES)
def test_evictions_within_a_prompt_are_exact(
    run_arm: RunArm, oracle: DenseOracle, policy: str
) -> None:
    """Later chunks and outputs see what is left of earlier ones, at its logical positions."""
    result = run_arm(make_chunked_spec())[policy]
    lengths = dict(zip(result["ids"], map(len, result["prompts"]), strict=True))
    within = [n for request, n, _ in result["evictions"] if n < lengths[request]]
    assert len(within) >= 4, "tokens must go before their prompt is complete"
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 10, "the evictions must matter"
    assert result["counters"]["relocations_total/committed"] >= 5


def test_prompt_larger_than_the_free_blocks_is_served_beside_others(
    run_arm: RunArm, oracle: DenseOracle
) -> None:
    """It runs while the others still decode, takes nobody's blocks, and every token is right."""
    result = run_arm(test_pressure.make_spec())["long"]
    assert max(step[0] for step in result["trace"]) == 4
    assert result["counters"]["preemptions_total"] == 0
    assert result["finish_reasons"] == ["length"] * 4
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert result["free_blocks"] == result["total_blocks"]


def test_without_the_option_such_a_prompt_waits(run_arm: RunArm) -> None:
    """The same load otherwise: the prompt is admitted only when the others are gone."""
    result = run_arm(test_pressure.make_spec())["long waits"]
    assert max(step[0] for step in result["trace"]) == 3
    assert result["finish_reasons"] == ["length"] * 4
