"""Every sampled token of an evicting engine agrees with the dense oracle, in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.workloads import EVICTING, NOTHING_EVICTED, in_mode, make_prompts, make_workload

pytestmark = pytest.mark.engine

POLICIES = ("streaming_llm", "random", "h2o")
MAX_LOGPROB_ERROR = 2e-3


def make_fp32_spec() -> dict[str, Any]:
    """Four requests of up to 480 tokens, 48 generated tokens each, in fp32, in both modes; at last
    with copies that are skipped."""
    prompts = make_prompts((180, 260, 333, 480))
    workloads = [make_workload(policy, 48, prompts=prompts) for policy in POLICIES]
    mutant = make_workload("random", 48, prompts=prompts, name="mutant", fault=["no_copy", [0]])
    return {
        "vtoken": {**EVICTING, "mode": "naive", "budget_tokens": 96, "evict_interval_tokens": 8},
        "engine": {"dtype": "float32"},
        "workloads": [
            *(in_mode("naive", one) for one in [NOTHING_EVICTED, *workloads]),
            *(in_mode("lazy", one) for one in [*workloads, mutant]),
        ],
    }


@pytest.fixture(scope="module")
def oracle(model_path: str) -> DenseOracle:
    """The reference model."""
    return DenseOracle(model_path)


@pytest.mark.parametrize("mode", ["naive", "lazy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_engine_agrees_with_dense_oracle(
    run_arm: RunArm, oracle: DenseOracle, mode: str, policy: str
) -> None:
    """Attention sees exactly the live tokens, at their logical positions."""
    result = run_arm(make_fp32_spec())[f"{mode} {policy}"]
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 20, "the evictions must matter"
    if mode == "lazy":
        assert result["counters"]["relocations_total/committed"] >= 10


def test_oracle_catches_skipped_copies(run_arm: RunArm, oracle: DenseOracle) -> None:
    """A mutant that commits moves without copying bytes passes tables and fails the oracle."""
    mutant = run_arm(make_fp32_spec())["lazy mutant"]
    assert mutant["counters"]["relocations_total/committed"] >= 10
    assert oracle.judge(mutant).num_mismatches > 20
