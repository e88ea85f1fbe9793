"""Pressure-activated eviction (``evict_free_ratio``): full quality while the pool is ample."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import test_pressure
from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.workloads import EVICTING, make_prompts, make_workload

pytestmark = pytest.mark.engine

RATIOS = (0.3, 0.1)
"""Not 0: with no more than one free block as destination, packing can get stuck between blocks
that are just over half full, and then vLLM preempts although the live tokens would fit."""


def make_ample_spec() -> dict[str, Any]:
    """Prompts over budget in a pool that they fill to a few percent."""
    prompts = make_prompts((180, 333, 480))
    own = {"policy": "random", "evict_free_ratio": 0.5}
    return {
        "vtoken": {**EVICTING, "mode": "lazy"},
        "engine": {"dtype": "float32"},
        "workloads": [
            make_workload("random", 24, prompts=prompts, patch=own),
            make_workload("none", 24, prompts=prompts),
        ],
    }


def make_tight_spec() -> dict[str, Any]:
    """The load of the pressure test, once per ratio."""
    spec = test_pressure.make_spec("early")
    (workload,) = spec["workloads"]
    workloads = [
        {**workload, "name": str(ratio), "patch": {"evict_free_ratio": ratio}} for ratio in RATIOS
    ]
    return {**spec, "workloads": workloads}


@pytest.fixture(scope="module")
def oracle(model_path: str) -> DenseOracle:
    """The reference model."""
    return DenseOracle(model_path)


def test_ample_pool_evicts_nothing(run_arm: RunArm) -> None:
    """Not a token goes, and outputs are those of policy ``none``."""
    results = run_arm(make_ample_spec())
    assert results["random"]["counters"]["evicted_tokens_total/random"] == 0
    assert results["random"]["tokens"] == results["none"]["tokens"]
    assert results["random"]["logprobs"] == results["none"]["logprobs"]


@pytest.mark.parametrize("ratio", RATIOS)
def test_tight_pool_evicts_rather_than_preempts(
    run_arm: RunArm, oracle: DenseOracle, ratio: float
) -> None:
    """Live tokens fit, so nobody is preempted; every token is the oracle's."""
    result = run_arm(make_tight_spec())[str(ratio)]
    assert result["counters"]["evicted_tokens_total/random"] > 0
    assert result["counters"]["preemptions_total"] == 0
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < test_pressure.MAX_LOGPROB_ERROR, verdict
    assert result["free_blocks"] == result["total_blocks"]
