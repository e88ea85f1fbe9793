"""Every sampled token of an evicting engine agrees with the dense oracle, in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import ensure_tiny_model
from tests.engine.workloads import (
    EVICTING,
    NOTHING_EVICTED,
    in_mode,
    make_prompts,
    make_workload,
    on_tiny_model,
)

pytestmark = pytest.mark.engine

POLICIES = ("streaming_llm", "random", "h2o")
MAX_LOGPROB_ERROR = 2e-3
VTOKEN = {**EVICTING, "mode": "naive", "budget_tokens": 96, "evict_interval_tokens": 8}


def make_workloads(*lengths: int) -> list[dict[str, Any]]:
    """Prompts of these lengths and 48 generated tokens each, under each policy."""
    return [make_workload(policy, 48, prompts=make_prompts(lengths)) for policy in POLICIES]


def make_fp32_spec() -> dict[str, Any]:
    """The embedded model: nothing evicted in mode naive, then two requests in lazy."""
    workloads = [in_mode("lazy", one) for one in make_workloads(180, 333)]
    return {
        "vtoken": VTOKEN,
        "engine": {"dtype": "float32"},
        "workloads": [in_mode("naive", NOTHING_EVICTED), *workloads],
    }


def make_tiny_spec() -> dict[str, Any]:
    """Four requests of up to 480 tokens in both modes; at last with copies that are skipped."""
    workloads = make_workloads(180, 260, 333, 480)
    mutant = {**workloads[1], "name": "mutant", "fault": ["no_copy", [0]]}
    return {
        **on_tiny_model(dtype="float32"),
        "vtoken": VTOKEN,
        "workloads": [
            *(in_mode("naive", one) for one in workloads),
            *(in_mode("lazy", one) for one in [*workloads, mutant]),
        ],
    }


@pytest.fixture(scope="module")
def oracle(model_path: str) -> DenseOracle:
    """The embedded model."""
    return DenseOracle(model_path)


@pytest.fixture(scope="module")
def tiny_oracle() -> DenseOracle:
    """The tiny model."""
    return DenseOracle(str(ensure_tiny_model()))


def assert_agrees(oracle: DenseOracle, result: dict[str, Any]) -> None:
    """Every token and logprob, and it would be otherwise without the evictions."""
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > verdict.num_tokens / 20, "evictions must matter"


@pytest.mark.parametrize("policy", POLICIES)
def test_engine_agrees_with_dense_oracle(run_arm: RunArm, oracle: DenseOracle, policy: str) -> None:
    """Attention sees exactly the live tokens, at their logical positions."""
    result = run_arm(make_fp32_spec())[f"lazy {policy}"]
    assert_agrees(oracle, result)
    assert result["counters"]["relocations_total/committed"] >= 5


@pytest.mark.parametrize("mode", ["naive", "lazy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tiny_engine_agrees_with_dense_oracle(
    run_arm: RunArm, tiny_oracle: DenseOracle, mode: str, policy: str
) -> None:
    """The same in both modes."""
    result = run_arm(make_tiny_spec())[f"{mode} {policy}"]
    assert_agrees(tiny_oracle, result)
    if mode == "lazy":
        assert result["counters"]["relocations_total/committed"] >= 10


def test_oracle_catches_skipped_copies(run_arm: RunArm, tiny_oracle: DenseOracle) -> None:
    """A mutant that commits moves without copying bytes passes tables and fails the oracle."""
    mutant = run_arm(make_tiny_spec())["lazy mutant"]
    assert mutant["counters"]["relocations_total/committed"] >= 10
    assert tiny_oracle.judge(mutant).num_mismatches > 20
