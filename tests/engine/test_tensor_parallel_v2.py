"""Two workers with Model Runner V2, one step ahead of their outputs, as vLLM runs on several GPUs.

Each worker is a process of its own, and Triton's interpreter runs V2's kernels in it. One engine
runs everything in mode naive, then in lazy.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import test_runner_v2, test_tensor_parallel
from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle
from tests.engine.runner_v2 import has_gpu
from tests.engine.test_runner_v2 import assert_exact, assert_ran_v2
from tests.engine.test_tensor_parallel import MODES, decisions
from tests.engine.workloads import in_mode, make_workload, outcome

pytestmark = [
    pytest.mark.engine,
    pytest.mark.identity,
    pytest.mark.gpu_interp,
    pytest.mark.skipif(has_gpu(), reason="one GPU is one rank"),
]

POLICIES = ("streaming_llm", "h2o", "snapkv")
FAULTY = "random"
"""In mode lazy, every third copy fails on the second rank meanwhile."""
FORGETFUL = "the second rank keeps victims"


def make_spec() -> dict[str, Any]:
    """As for one rank: each policy in both modes; then faults of one of the ranks."""
    spec = test_runner_v2.make_async_spec()
    prompts = spec["workloads"][0]["prompts"]
    each = [make_workload(policy, 48, prompts=prompts) for policy in (*POLICIES, FAULTY)]
    workloads = [in_mode(mode, one) for mode in MODES for one in each]
    workloads[-1]["fault"] = ["flaky_copy", [1]]
    forgetful = {**workloads[0], "name": FORGETFUL, "fault": ["keep_victims", [1]]}
    return {
        **spec,
        "engine": {**spec["engine"], "tensor_parallel_size": 2},
        "workloads": [*workloads, {**forgetful, "may_stop": True}],
    }


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(test_tensor_parallel.model())


@pytest.mark.parametrize("policy", [*POLICIES, FAULTY])
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, policy: str) -> None:
    """Both ranks run V2 and ours; every step of each reads the rows that the scheduler means."""
    results = run_arm(make_spec())
    naive, lazy = results[f"naive {policy}"], results[f"lazy {policy}"]
    for result in (naive, lazy):
        assert_ran_v2(result, asynchronous=True, num_ranks=2)
        assert result["free_blocks"] == result["total_blocks"]
        assert result["counters"]["invariant_checks_total/I2"] > 0
        for invariant in ("I1", "I2", "I4"):
            assert result["counters"][f"invariant_violations_total/{invariant}"] == 0
    assert lazy["counters"]["relocations_total/committed"] >= 10
    assert outcome(naive) == outcome(lazy)


@pytest.mark.parametrize("policy", [*POLICIES, FAULTY])
def test_agrees_with_the_dense_oracle(run_arm: RunArm, oracle: DenseOracle, policy: str) -> None:
    """Each rank reads its own heads of exactly the live tokens."""
    assert_exact(oracle, run_arm(make_spec())[f"lazy {policy}"])


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o"])
def test_two_ranks_decide_as_one(run_arm: RunArm, policy: str) -> None:
    """Victims and tokens of V2 on one rank, from the same scores."""
    one = run_arm(test_runner_v2.make_async_spec())[f"lazy {policy}"]
    two = run_arm(make_spec())[f"lazy {policy}"]
    assert decisions(one) == decisions(two)


def test_a_copy_that_fails_on_one_rank_is_rolled_back_on_both(run_arm: RunArm) -> None:
    """With a step in flight; what became of its outputs, the tests above say."""
    lazy = run_arm(make_spec())[f"lazy {FAULTY}"]
    assert lazy["counters"]["relocations_total/failed"] >= 3
    assert set(lazy["finish_reasons"]) == {"length"}


def test_a_rank_with_other_victims_is_found(run_arm: RunArm) -> None:
    """The row that it reads is compared, too: a rank that evicts nobody stops the engine."""
    assert "invariant I2 violated" in run_arm(make_spec())[FORGETFUL]["stopped"]
