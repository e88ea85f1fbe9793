"""Pressure-activated eviction (``evict_free_ratio``): full quality while the pool is ample."""

from __future__ import annotations

import pytest

from tests.engine import test_long_prompts, test_pressure
from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(str(ensure_tiny_model()))


def test_ample_pool_evicts_nothing(run_arm: RunArm) -> None:
    """Not a token goes, and outputs are those of policy ``none``."""
    results = run_arm(test_long_prompts.make_chunked_spec())
    ample, none = results["ample"], results["none"]
    assert ample["counters"]["evicted_tokens_total/random"] == 0
    assert ample["tokens"] == none["tokens"]
    assert ample["logprobs"] == none["logprobs"]


@pytest.mark.parametrize("ratio", test_pressure.RATIOS)
def test_tight_pool_evicts_rather_than_preempts(
    run_arm: RunArm, oracle: DenseOracle, ratio: float
) -> None:
    """Live tokens fit, so nobody is preempted; every token is the oracle's."""
    result = run_arm(test_pressure.make_spec())[f"ratio {ratio}"]
    assert result["counters"]["evicted_tokens_total/random"] > 0
    assert result["counters"]["preemptions_total"] == 0
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < test_pressure.MAX_LOGPROB_ERROR, verdict
    assert result["free_blocks"] == result["total_blocks"]
