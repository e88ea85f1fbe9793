"""The whole GPU path in a real engine, but for the GPU: see gpu_path.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import gpu_path, test_tensor_parallel
from tests.engine.conftest import run_program
from tests.engine.oracle import DenseOracle
from tests.engine.tiny_model import BYTES_PER_TOKEN
from tests.engine.workloads import make_prompts, make_workload

pytestmark = [pytest.mark.engine, pytest.mark.gpu_interp]

CAUGHT_BY = {
    "copies": ("kernel got wrong", "while tokens were moved", "after tokens were moved"),
    "overwrites": ("must not touch",),
    "scores": ("scores",),
    "reads": ("prefill", "decode"),
    "leaves": ("prefill", "decode"),
    "answers": ("prefill",),
}
"""A word of the proof that must notice a mutant, by its first word."""


RUNNERS = ("v2", "v1")
THROUGH_THE_RUNNER = ("reads the table of its capture", "copies nothing, in whole steps")
"""Mutants that must be caught with either runner; the others break what both share."""
CAUGHT = [
    *(("v2", mutant) for mutant in gpu_path.MUTANTS),
    *(("v1", mutant) for mutant in THROUGH_THE_RUNNER),
]
STILL, FORGETFUL, TIGHT = "h2o that moves nothing", "moves without copies", "a tight pool"
NUM_BLOCKS = 36


def make_spec(runner: str) -> dict[str, Any]:
    """The checks of the device, then a policy with scores, everything verified.

    With V1 also the same in mode naive, more than fits, and at last a copy engine that copies
    nothing, while nobody verifies; with V2 others see to that (test_runner_v2.py).
    """
    spec = test_tensor_parallel.make_spec("lazy", 1)
    mutants = [mutant for name, mutant in CAUGHT if name == runner]
    scored = make_workload("h2o", 22, prompts=make_prompts((70, 130)))
    tight = make_workload("random", 60, prompts=make_prompts((120,) * 4, step=41))
    forgetful = with_patch(scored, FORGETFUL, budget_tokens=48, verify="off")
    further = [
        with_patch(scored, STILL, mode="naive"),
        with_patch(tight, TIGHT, mode="lazy", budget_tokens=128),
        {**forgetful, "fault": ["no_copy", [0]]},
    ]
    limits = {
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": NUM_BLOCKS * 16 * 2 * 2 * BYTES_PER_TOKEN,  # fp32, two KV heads
        "max_model_len": 512,
    }
    settings = {"budget_tokens": 48, "evict_interval_tokens": 5, "headroom_blocks": 1}
    return {
        **spec,
        "runner": runner,
        "vtoken": {**spec["vtoken"], **settings},
        "engine": {**spec["engine"], **limits},
        "workloads": [
            {"name": "check", "check": mutants},
            scored,
            *(further if runner == "v1" else []),
        ],
    }


def with_patch(workload: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """The same load under other settings."""
    return {**workload, "name": name, "patch": {**workload["patch"], **changes}}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    """The generation of vLLM's model runner."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Results of the one engine of a generation."""

    @functools.cache
    def run(runner: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"gpu_path_{runner}")
        run_program("tests.engine.gpu_path", json.dumps(make_spec(runner)), folder)
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found

    return run


@pytest.fixture
def results(runner: str, run_engine: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Of the engine with the test's runner."""
    return run_engine(runner)


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(test_tensor_parallel.model())


RAN = {
    "v1": ("gpu_runner_v1.VTokenGPUModelRunnerV1", "vllm.v1.worker.gpu_model_runner"),
    "v2": ("gpu_runner.VTokenGPUModelRunner", "vllm.v1.worker.gpu.model_runner"),
}
"""Our class of a generation, and the module of vLLM's."""


@pytest.mark.timeout(900)
def test_the_runner_is_of_the_generation_that_was_asked_for(
    runner: str, results: dict[str, Any]
) -> None:
    """Ours over vLLM's; the other generation is not involved. The scheduler is one step ahead."""
    ours, theirs = RAN[runner]
    for name in results.keys() - {"check"}:
        classes = results[name]["runner"]
        assert f"vtoken.integration.vllm.{ours}" in classes
        stock = {path.rpartition(".")[0] for path in classes if path.endswith("GPUModelRunner")}
        assert theirs in stock
        assert not stock & {module for _, module in RAN.values()} - {theirs}
        assert results[name]["classes"]["attention"].endswith("LiveTritonImpl")
        assert results[name]["classes"]["scheduler"].endswith("VTokenAsyncScheduler")


def test_the_device_is_checked_before_it_serves(results: dict[str, Any]) -> None:
    """Copies, reads, scores and whole steps, after vLLM's own warm-up; no trace is left."""
    check = results["check"]
    findings = check["findings"]
    assert all(ok for *_, ok in findings), findings
    names = " ".join(name for name, *_ in findings)
    for part in ("relocation kernel", "overtook", "prefill", "decode", "mixed", "scores", "moved"):
        assert part in names
    assert check["rows_left"] == check["words_left"] == 0


@pytest.mark.parametrize(("runner", "mutant"), CAUGHT, indirect=["runner"])
def test_a_broken_device_is_caught(results: dict[str, Any], mutant: str) -> None:
    """Each by a proof that says what is wrong."""
    caught = results["check"]["caught"][mutant]
    assert caught is not None
    assert any(word in caught for word in CAUGHT_BY[mutant.split()[0]]), caught


def assert_exact(oracle: DenseOracle, result: dict[str, Any]) -> None:
    """Every token is the oracle's, and would not be without the evictions."""
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < test_tensor_parallel.MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 10, "the evictions must matter"
    assert result["free_blocks"] == result["total_blocks"]


def test_tokens_are_those_of_the_dense_oracle(results: dict[str, Any], oracle: DenseOracle) -> None:
    """Scored on the device, evicted, relocated by the kernel, read through live tables."""
    assert_exact(oracle, results["h2o"])
    assert results["h2o"]["counters"]["relocations_total/committed"] >= 2


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_preempted_requests_stay_exact(results: dict[str, Any], oracle: DenseOracle) -> None:
    """Preempted with a step in flight and computed again: tokens of both lives are right."""
    result = results[TIGHT]
    assert result["counters"]["preemptions_total"] >= 1
    assert result["counters"]["relocations_total/committed"] >= 5
    assert set(result["finish_reasons"]) == {"length"}
    assert_exact(oracle, result)


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_nothing_depends_on_where_tokens_lie(results: dict[str, Any]) -> None:
    """Mode naive takes the same decisions and gives the same tokens and logprobs, bit for bit."""
    lazy, naive = results["h2o"], results[STILL]
    assert naive["counters"]["relocations_total/committed"] == 0
    assert numbered_evictions(naive) == numbered_evictions(lazy)
    assert numbered_evictions(lazy)
    for what in ("tokens", "logprobs"):
        assert naive[what] == lazy[what]


def numbered_evictions(result: dict[str, Any]) -> list[Any]:
    """Victims of the requests by their place in the workload, whatever they are called."""
    return [[result["ids"].index(request), *rest] for request, *rest in result["evictions"]]


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_oracle_catches_skipped_copies(results: dict[str, Any], oracle: DenseOracle) -> None:
    """The same load with a copy engine that copies nothing."""
    mutant = results[FORGETFUL]
    assert mutant["counters"]["relocations_total/committed"] >= 2
    assert oracle.judge(mutant).num_mismatches > 5


@pytest.mark.parametrize(
    ("runner", "workload"), [("v2", "h2o"), ("v1", "h2o"), ("v1", TIGHT)], indirect=["runner"]
)
def test_every_invariant_holds_on_the_device(results: dict[str, Any], workload: str) -> None:
    """Digests of the paged pool before and after copies, rows read back from the device."""
    counters = results[workload]["counters"]
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_checks_total/{invariant}"] > 0
        assert counters[f"invariant_violations_total/{invariant}"] == 0


def test_scores_come_before_the_copies_and_these_before_the_next_forward(
    results: dict[str, Any],
) -> None:
    """On their streams: score → forward event → copy → relocation event → wait."""
    log = [tuple(entry) for entry in results["h2o"]["stream_log"]]
    copies = [i for i, entry in enumerate(log) if entry == ("copy", "relocation")]
    assert ("score", "compute") in log
    assert len(copies) >= 2
    for i in copies:
        before, after = log[:i], log[i + 1 :]
        # Nothing is queued on the compute stream between a batch's forward event and its copy.
        assert [entry[0] for entry in before[-4:]] == ["record", "wait", "record", "upload"]
        compute = [entry[0] for entry in after if entry[1] == "compute"]
        assert compute[:3] == ["record", "wait", "record"]
