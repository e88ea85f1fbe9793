"""Requests with and without a LoRA adapter in one batch, evicted and relocated alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine import lora, test_tensor_parallel
from tests.engine.conftest import run_program
from tests.engine.oracle import DenseOracle
from tests.engine.workloads import make_prompts, make_workload

pytestmark = pytest.mark.engine

PER_REQUEST = ("ids", "prompts", "tokens", "logprobs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the adapter, the merged model and the engine's result."""
    folder = tmp_path_factory.mktemp("lora")
    lora.make_adapter(test_tensor_parallel.model(), folder / "adapter", folder / "merged")
    spec = test_tensor_parallel.make_spec("lazy", 1)
    spec["lora"] = str(folder / "adapter")
    # Stock vLLM on CPU gives requests without an adapter the last slot: leave it empty.
    spec["engine"] |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    spec["engine"]["enable_prefix_caching"] = True
    prompts = make_prompts((70, 150, 333, 411), step=0)  # equal beginnings, other keys
    spec["workloads"] = [make_workload("h2o", 48, prompts=prompts)]
    run_program("tests.engine.lora", json.dumps(spec), folder)
    return folder


def judge(folder: Path, model: str, odd: int) -> Any:
    """The oracle's verdict on every other request."""
    result = json.loads((folder / "result.json").read_text())["h2o"]
    assert result["counters"]["relocations_total/committed"] >= 4
    assert result["counters"]["invariant_violations_total/I1"] == 0
    part = {name: result[name][odd::2] for name in PER_REQUEST}
    return DenseOracle(model).judge({**result, **part})


@pytest.mark.parametrize("odd", [0, 1], ids=["base model", "adapter"])
def test_tokens_are_those_of_each_requests_own_model(folder: Path, odd: int) -> None:
    """Keys and values differ between the two; neither's blocks or scores reach the other."""
    models = (test_tensor_parallel.model(), str(folder / "merged"))
    verdict = judge(folder, models[odd], odd)
    assert verdict.num_mismatches == 0, verdict
    assert verdict.max_logprob_error < test_tensor_parallel.MAX_LOGPROB_ERROR, verdict
    assert verdict.num_mismatches_without_mask > 10, "the evictions must matter"
    assert judge(folder, models[1 - odd], odd).num_mismatches > 20, "the adapter must matter"
