"""Two workers that share the heads out: same tables, merged reports, one decision.

One engine runs everything in mode naive, then in lazy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import ENVIRONMENT, ensure_tiny_model
from tests.engine.workloads import EVICTING, in_mode, make_prompts, make_workload, outcome

pytestmark = [pytest.mark.engine, pytest.mark.identity]

POLICIES = ("streaming_llm", "h2o", "knorm")
"""Without scores, with observed queries, and with scores read from the cache."""
MODES = ("naive", "lazy")
SCORED = {"h2o": "attention_sum", "knorm": "key_norm"}
MAX_LOGPROB_ERROR = 2e-3
MAX_SCORE_ERROR = 1e-4
FAULTY = "every third copy fails on the second rank"


def model() -> str:
    """Four heads and two KV heads: each of two ranks has a whole group of its own."""
    return str(ensure_tiny_model(num_heads=4, num_kv_heads=2))


def make_spec(mode: str, num_ranks: int) -> dict[str, Any]:
    """Each policy; fp32, for the oracle."""
    prompts = make_prompts((70, 150, 333, 411))
    workloads = [
        make_workload(policy, 48, prompts=prompts, record_signals=policy in SCORED)
        for policy in POLICIES
    ]
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
        "workloads": workloads,
    }


def make_two_ranks_spec(dtype: str = "float32") -> dict[str, Any]:
    """Each policy in both modes; in fp32 also relocations that fail on the second rank."""
    spec = make_spec("naive", 2)
    each = spec["workloads"]
    if dtype == "float32":
        each.append(make_workload("random", 112, prompts=each[0]["prompts"], name=FAULTY))
    both = [in_mode(mode, one) for mode in MODES for one in each]
    if dtype == "float32":
        both[-1]["fault"] = ["flaky_copy", [1]]
    return {**spec, "engine": {**spec["engine"], "dtype": dtype}, "workloads": both}


def decisions(result: dict[str, Any]) -> dict[str, Any]:
    """Victims and tokens, which another order of sums must not change in fp32."""
    return {what: outcome(result)[what] for what in ("evictions", "tokens")}


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(model())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, dtype: str, policy: str) -> None:
    """On two ranks too, victims, tokens and logprobs do not depend on where tokens lie."""
    results = run_arm(make_two_ranks_spec(dtype))
    naive, lazy = results[f"naive {policy}"], results[f"lazy {policy}"]
    assert naive["counters"]["relocations_total/committed"] == 0
    assert lazy["counters"]["relocations_total/committed"] >= 10
    assert len(lazy["runners"]) == 2
    assert outcome(naive) == outcome(lazy)
    assert lazy["free_blocks"] == lazy["total_blocks"]


@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_agree_with_the_dense_oracle(
    run_arm: RunArm, oracle: DenseOracle, policy: str
) -> None:
    """Each rank reads its own heads of exactly the live tokens."""
    verdict = oracle.judge(run_arm(make_two_ranks_spec())[f"lazy {policy}"])
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 20, "the evictions must matter"


@pytest.mark.parametrize("policy", SCORED)
def test_scores_are_those_of_one_rank(run_arm: RunArm, policy: str) -> None:
    """The mean over the ranks' heads is the mean over all heads, and so victims are the same."""
    one = run_arm(make_spec("lazy", 1))[policy]
    two = run_arm(make_two_ranks_spec())[f"lazy {policy}"]
    assert len(two["signals"]) >= 20
    for ours, theirs in zip(one["signals"], two["signals"], strict=True):
        requests = [r["ids"].index(signal[0]) for r, signal in ((one, ours), (two, theirs))]
        assert [requests[0], ours[1]] == [requests[1], theirs[1]]
        score = np.array(ours[2][SCORED[policy]])
        np.testing.assert_allclose(
            np.array(theirs[2][SCORED[policy]]), score, atol=MAX_SCORE_ERROR * score.max()
        )
    assert decisions(one) == decisions(two)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rank_verifies_its_own_bytes(run_arm: RunArm, policy: str) -> None:
    """Digests of both ranks are compared, twice as many as one rank has."""
    one = run_arm(make_spec("lazy", 1))[policy]["counters"]
    two = run_arm(make_two_ranks_spec())[f"lazy {policy}"]["counters"]
    assert two["invariant_checks_total/I1"] == 2 * one["invariant_checks_total/I1"] > 0
    for invariant in ("I1", "I2", "I4"):
        assert two[f"invariant_violations_total/{invariant}"] == 0


def test_a_copy_that_fails_on_one_rank_is_rolled_back_on_both(run_arm: RunArm) -> None:
    """The other rank's copy was fine and is forgotten too: outputs equal those of naive."""
    results = run_arm(make_two_ranks_spec())
    naive, lazy = results[f"naive {FAULTY}"], results[f"lazy {FAULTY}"]
    assert lazy["counters"]["relocations_total/failed"] >= 3
    assert lazy["counters"]["relocations_total/committed"] >= 5
    assert outcome(naive) == outcome(lazy)
    assert lazy["free_blocks"] == lazy["total_blocks"]
    assert set(lazy["finish_reasons"]) == {"length"}
