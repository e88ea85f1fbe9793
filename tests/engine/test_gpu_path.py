"""The whole GPU path in a real engine, but for the GPU: see gpu_path.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine import gpu_path, test_tensor_parallel
from tests.engine.conftest import run_program
from tests.engine.oracle import DenseOracle
from tests.engine.workloads import make_prompts, make_workload

pytestmark = [pytest.mark.engine, pytest.mark.gpu_interp]

CHECK = {"name": "check", "check": True}
CAUGHT_BY = {
    "copies": ("kernel got wrong", "while tokens were moved", "after tokens were moved"),
    "overwrites": ("must not touch",),
    "scores": ("scores",),
    "reads": ("prefill", "decode"),
    "leaves": ("prefill", "decode"),
    "answers": ("prefill",),
}
"""A word of the proof that must notice a mutant, by its first word."""


def make_spec() -> dict[str, Any]:
    """The checks of the device, then a policy with scores, everything verified."""
    spec = test_tensor_parallel.make_spec("lazy", 1)
    limits = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 23, "max_model_len": 512}
    return {
        **spec,
        "vtoken": {**spec["vtoken"], "budget_tokens": 48, "evict_interval_tokens": 5},
        "engine": {**spec["engine"], **limits},
        "workloads": [CHECK, make_workload("h2o", 22, prompts=make_prompts((70, 130)))],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one engine."""
    folder = tmp_path_factory.mktemp("gpu_path")
    run_program("tests.engine.gpu_path", json.dumps(make_spec()), folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def oracle() -> DenseOracle:
    """The reference model."""
    return DenseOracle(test_tensor_parallel.model())


@pytest.mark.timeout(900)
def test_the_device_is_checked_before_it_serves(results: dict[str, Any]) -> None:
    """Copies, reads, scores and whole steps, after vLLM's own warm-up; no trace is left."""
    check = results["check"]
    findings = check["findings"]
    assert all(ok for *_, ok in findings), findings
    names = " ".join(name for name, *_ in findings)
    for part in ("relocation kernel", "overtook", "prefill", "decode", "mixed", "scores", "moved"):
        assert part in names
    assert check["rows_left"] == check["words_left"] == 0


@pytest.mark.parametrize("mutant", gpu_path.MUTANTS)
def test_a_broken_device_is_caught(results: dict[str, Any], mutant: str) -> None:
    """Each by a proof that says what is wrong."""
    caught = results["check"]["caught"][mutant]
    assert caught is not None
    assert any(word in caught for word in CAUGHT_BY[mutant.split()[0]]), caught


def test_tokens_are_those_of_the_dense_oracle(results: dict[str, Any], oracle: DenseOracle) -> None:
    """Scored on the device, evicted, relocated by the kernel, read through live tables."""
    result = results["h2o"]
    assert result["classes"]["attention"].endswith("LiveTritonImpl")
    assert result["classes"]["scheduler"].endswith("VTokenAsyncScheduler")
    verdict = oracle.judge(result)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < test_tensor_parallel.MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 10, "the evictions must matter"
    assert result["counters"]["relocations_total/committed"] >= 2
    assert result["free_blocks"] == result["total_blocks"]


def test_every_invariant_holds_on_the_device(results: dict[str, Any]) -> None:
    """Digests of the paged pool before and after copies, rows read back from the device."""
    counters = results["h2o"]["counters"]
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
