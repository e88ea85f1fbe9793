"""Model Runner V2, which vLLM takes on GPUs, under Triton's interpreter: the same layer, one step
ahead of the outputs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.engine import test_stress, test_tensor_parallel
from tests.engine.conftest import RunArm
from tests.engine.oracle import DenseOracle, lives_of
from tests.engine.runner_v2 import SWITCH, has_gpu, runner_of
from tests.engine.tiny_model import BYTES_PER_TOKEN, ENVIRONMENT
from tests.engine.workloads import in_mode, make_prompts, make_workload, outcome

pytestmark = [pytest.mark.engine, pytest.mark.identity, pytest.mark.gpu_interp]

POLICIES = ("streaming_llm", "random", "h2o")
MAX_LOGPROB_ERROR = 2e-3
NO_COPY = "moves without copies"
STOPPED = "ends with a token"
NUM_BLOCKS = 66
RUNNERS = {
    "v1": "gpu_runner_v1.VTokenGPUModelRunnerV1",
    "v2": "gpu_runner.VTokenGPUModelRunner",
}
"""On GPUs, where a switch may ask for the other generation."""
RUNNER = "vtoken.integration.vllm." + (
    RUNNERS[runner_of({"runner": "v2"})] if has_gpu() else "model_runner_v2.VTokenCPUModelRunnerV2"
)
SCHEDULERS = {
    True: "vtoken.integration.vllm.scheduler.VTokenAsyncScheduler",
    False: "vtoken.integration.vllm.scheduler.VTokenScheduler",
}


def make_sync_spec() -> dict[str, Any]:
    """What the V1 runner is given elsewhere, step by step."""
    return {**test_tensor_parallel.make_spec("lazy", 1), "runner": "v2", "async": False}


def make_async_spec() -> dict[str, Any]:
    """Each policy in both modes, a request that ends with a token, and at last relocations that are
    never carried out."""
    prompts = make_prompts((70, 150, 333, 411))
    workloads = [make_workload(policy, 48, prompts=prompts) for policy in POLICIES]
    options = [{"vtoken_receipt": f"key-{i}"} for i in range(len(prompts))]
    stop = {"name": STOPPED, "options": options, "stop_at": ["naive random", 1, 20]}
    fault = {"name": NO_COPY, "fault": ["no_copy", [0]]}
    fault["patch"] = {"policy": "random", "verify": "off"}  # or it is noticed before the oracle's
    workload = make_workload("random", 48, prompts=prompts)
    spec = test_tensor_parallel.make_spec("naive", 1)
    return {
        **spec,
        "vtoken": {**spec["vtoken"], "evict_interval_tokens": 6},
        "workloads": [
            *(in_mode("naive", one) for one in workloads),
            {**workload, **stop},
            *(in_mode("lazy", one) for one in workloads),
            {**workload, **fault},
        ],
        "runner": "v2",
        "async": True,
    }


def make_tight_spec() -> dict[str, Any]:
    """Eight prompts that just fit; what they generate does not, so some are preempted."""
    spec = make_async_spec()
    workload = make_workload("random", 80, prompts=make_prompts((120,) * 8, step=41))
    vtoken = {"mode": "lazy", "budget_tokens": 128, "headroom_blocks": 1, "max_source_blocks": 6}
    bytes_per_token = 2 * 2 * BYTES_PER_TOKEN  # fp32, two KV heads
    engine = {"max_model_len": 512, "kv_cache_memory_bytes": NUM_BLOCKS * 16 * bytes_per_token}
    return {
        **spec,
        "vtoken": {**spec["vtoken"], **vtoken},
        "engine": {**spec["engine"], **engine},
        "workloads": [workload],
    }


def make_stress_spec() -> dict[str, Any]:
    """The stress test's load, shorter: a step costs tens of milliseconds here."""
    spec = test_stress.make_spec()
    (workload,) = spec["workloads"]
    stress = {**workload["stress"], "num_requests": 24, "output_tokens": [1, 40]}
    stress |= {"preempt_ratio": 0.1, "seed": 2}
    bytes_per_token = 2 * BYTES_PER_TOKEN  # bf16, two KV heads
    engine = {"kv_cache_memory_bytes": 90 * 16 * bytes_per_token, "skip_tokenizer_init": True}
    return {
        **spec,
        "model": test_tensor_parallel.model(),
        "environment": ENVIRONMENT,
        "engine": {**spec["engine"], **engine},
        "workloads": [{**workload, "stress": stress}],
        "runner": "v2",
        "async": True,
    }


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(test_tensor_parallel.model())


def assert_ran_v2(result: dict[str, Any], *, asynchronous: bool, num_ranks: int = 1) -> None:
    """vLLM falls back to V1 with a log line only."""
    assert result["runners"] == [RUNNER] * num_ranks
    assert result["classes"]["scheduler"] == SCHEDULERS[asynchronous]


def assert_exact(oracle: DenseOracle, result: dict[str, Any]) -> None:
    """Every token is the oracle's, and would not be without the evictions."""
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 20, "the evictions must matter"


@pytest.mark.skipif(bool(os.environ.get(SWITCH)), reason="all engines have one runner")
@pytest.mark.parametrize("policy", test_tensor_parallel.POLICIES)
def test_both_runners_agree_token_for_token(run_arm: RunArm, policy: str) -> None:
    """Without a step of delay V2 takes V1's decisions: victims, tokens, relocations."""
    v1 = run_arm(test_tensor_parallel.make_spec("lazy", 1))[policy]
    v2 = run_arm(make_sync_spec())[policy]
    assert v1["classes"]["runner"] != RUNNER
    assert_ran_v2(v2, asynchronous=False)
    for what in ("evictions", "tokens"):
        assert v1[what] == v2[what]
    for name in ("relocations_total/committed", "relocated_tokens_total"):
        assert v1["counters"][name] == v2["counters"][name] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_step_ahead_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, policy: str) -> None:
    """A step is scheduled before the last one's evictions are known; still nothing depends on
    where tokens lie."""
    naive, lazy = (run_arm(make_async_spec())[f"{mode} {policy}"] for mode in ("naive", "lazy"))
    for result in (naive, lazy):
        assert_ran_v2(result, asynchronous=True)
        assert result["free_blocks"] == result["total_blocks"]
    assert lazy["counters"]["relocations_total/committed"] >= 10
    assert outcome(naive) == outcome(lazy)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_step_ahead_agrees_with_the_dense_oracle(
    run_arm: RunArm, oracle: DenseOracle, policy: str
) -> None:
    """The step in flight still reads the victims, the next one does not."""
    assert_exact(oracle, run_arm(make_async_spec())[f"lazy {policy}"])


def test_oracle_catches_skipped_copies(run_arm: RunArm, oracle: DenseOracle) -> None:
    """The same engine with a copy engine that copies nothing."""
    mutant = run_arm(make_async_spec())[NO_COPY]
    assert mutant["counters"]["relocations_total/committed"] >= 10
    assert oracle.judge(mutant).num_mismatches > 20


def test_receipts_do_not_count_what_was_computed_for_nothing(run_arm: RunArm) -> None:
    """When a request ends with a token, the step that computes this token is on its way."""
    result = run_arm(make_async_spec())[STOPPED]
    assert "stop" in result["finish_reasons"]
    parts = zip(result["prompts"], result["tokens"], result["receipts"], strict=True)
    for prompt, tokens, receipt in parts:
        computed = len(prompt) + len(tokens) - 1
        assert receipt["evicted_tokens"] + receipt["live_tokens"] == computed


def test_preempted_requests_stay_exact(run_arm: RunArm, oracle: DenseOracle) -> None:
    """Preempted with a step in flight and computed again: tokens of both lives are right."""
    result = run_arm(make_tight_spec())["random"]
    assert_ran_v2(result, asynchronous=True)
    counters = result["counters"]
    assert counters["preemptions_total"] >= 1
    assert counters["relocations_total/committed"] >= 10
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_checks_total/{invariant}"] > 0
        assert counters[f"invariant_violations_total/{invariant}"] == 0
    assert set(result["finish_reasons"]) == {"length"}
    assert result["free_blocks"] == result["total_blocks"]
    assert_exact(oracle, result)


def test_aborts_and_sharing_one_step_ahead(run_arm: RunArm) -> None:
    """Aborts with relocations in flight, preemptions, a shared prefix and changes of policy; every
    row that a step reads is compared with what its scheduler meant."""
    result = run_arm(make_stress_spec())["stress"]
    counters = result["counters"]
    assert all(wanted == delivered for wanted, delivered in result["finished"])
    assert sum(result["aborted"].values()) >= 1
    assert len(result["release_steps"]) >= 1
    assert max(result["release_steps"]) <= 2
    assert counters["preemptions_total"] >= 1
    assert counters["relocations_total/committed"] >= 10
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_checks_total/{invariant}"] > 0
        assert counters[f"invariant_violations_total/{invariant}"] == 0
    assert result["free_blocks"] == result["total_blocks"]
    assert result["num_tables"] == 0


def test_lives_are_split_where_a_request_was_preempted() -> None:
    """An eviction of nothing marks it; queries from there on belong to the next life."""
    log = [(10, [1]), (14, [2, 3]), (15, []), (20, [1]), (21, [])]
    assert lives_of(log) == [(0, [(10, [1]), (14, [2, 3])]), (15, [(20, [1])]), (21, [])]
    assert lives_of([]) == [(0, [])]
