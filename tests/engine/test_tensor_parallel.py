"""Two workers that share the heads out: same tables, merged reports, one decision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import ENVIRONMENT, ensure_tiny_model
from tests.engine.workloads import EVICTING, make_prompts, make_workload

pytestmark = [pytest.mark.engine, pytest.mark.identity]

POLICIES = ("streaming_llm", "h2o", "knorm")
"""Without scores, with observed queries, and with scores read from the cache."""
SCORED = {"h2o": "attention_sum", "knorm": "key_norm"}
MAX_LOGPROB_ERROR = 2e-3
MAX_SCORE_ERROR = 1e-4
FAULTY = "every third copy fails on the second rank"


def model() -> str:
    """Four heads and two KV heads: each of two ranks has a whole group of its own."""
    return str(ensure_tiny_model(num_heads=4, num_kv_heads=2))


def make_spec(mode: str, num_ranks: int) -> dict[str, Any]:
    """Each policy, then relocations that fail on one of the ranks; fp32, for the oracle."""
    prompts = make_prompts((70, 150, 333, 411))
    workloads = [
        make_workload(policy, 48, prompts=prompts, record_signals=policy in SCORED)
        for policy in POLICIES
    ]
    faulty = make_workload("random", 112, prompts=prompts, name=FAULTY)
    if mode == "lazy" and num_ranks > 1:
        faulty["fault"] = ["flaky_copy", [1]]
    return {
        "model": model(),
        "environment": ENVIRONMENT,
        "vtoken": {
            **EVICTING,
            "mode": mode,
            "budget_tokens": 96,
            "evict_interval_tokens": 8,
            "verify": "full",
        },
        "engine": {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": num_ranks,
        },
        "workloads": [*workloads, faulty],
    }


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(model())


@pytest.mark.parametrize("policy", POLICIES)
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, policy: str) -> None:
    """On two ranks too, victims, tokens and logprobs do not depend on where tokens lie."""
    naive, lazy = run_arm(make_spec("naive", 2))[policy], run_arm(make_spec("lazy", 2))[policy]
    assert lazy["counters"]["relocations_total/committed"] >= 10
    for what in ("evictions", "tokens", "logprobs"):
        assert naive[what] == lazy[what]
    assert lazy["free_blocks"] == lazy["total_blocks"]


@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_agree_with_the_dense_oracle(
    run_arm: RunArm, oracle: DenseOracle, policy: str
) -> None:
    """Each rank reads its own heads of exactly the live tokens."""
    verdict = oracle.judge(run_arm(make_spec("lazy", 2))[policy])
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 20, "the evictions must matter"


@pytest.mark.parametrize("policy", SCORED)
def test_scores_are_those_of_one_rank(run_arm: RunArm, policy: str) -> None:
    """The mean over the ranks' heads is the mean over all heads, and so victims are the same."""
    one, two = run_arm(make_spec("lazy", 1))[policy], run_arm(make_spec("lazy", 2))[policy]
    assert len(two["signals"]) >= 20
    for (req_id, observed, values), other in zip(one["signals"], two["signals"], strict=True):
        assert [req_id, observed] == other[:2]
        score = np.array(values[SCORED[policy]])
        np.testing.assert_allclose(
            np.array(other[2][SCORED[policy]]), score, atol=MAX_SCORE_ERROR * score.max()
        )
    assert one["evictions"] == two["evictions"]
    assert one["tokens"] == two["tokens"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rank_verifies_its_own_bytes(run_arm: RunArm, policy: str) -> None:
    """Digests of both ranks are compared, twice as many as one rank has."""
    one, two = (run_arm(make_spec("lazy", n))[policy]["counters"] for n in (1, 2))
    assert two["invariant_checks_total/I1"] == 2 * one["invariant_checks_total/I1"] > 0
    for invariant in ("I1", "I2", "I4"):
        assert two[f"invariant_violations_total/{invariant}"] == 0


def test_a_copy_that_fails_on_one_rank_is_rolled_back_on_both(run_arm: RunArm) -> None:
    """The other rank's copy was fine and is forgotten too: outputs equal those of naive."""
    naive, lazy = run_arm(make_spec("naive", 2))[FAULTY], run_arm(make_spec("lazy", 2))[FAULTY]
    assert lazy["counters"]["relocations_total/failed"] >= 3
    assert lazy["counters"]["relocations_total/committed"] >= 5
    for what in ("evictions", "tokens", "logprobs"):
        assert naive[what] == lazy[what]
    assert lazy["free_blocks"] == lazy["total_blocks"]
    assert set(lazy["finish_reasons"]) == {"length"}
