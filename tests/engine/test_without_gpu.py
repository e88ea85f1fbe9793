"""On a machine without CUDA and Triton everything is there but the GPU path itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_model import ENVIRONMENT, ensure_tiny_model

REPOSITORY = Path(__file__).parents[2]
BLOCKER = """
import sys
for name in ("triton", "flashinfer", "flash_attn", "pynvml", "cuda", "cupy"):
    sys.modules[name] = None
"""
"""As ``sitecustomize``: every process that starts from here on cannot import these."""

NEED_TRITON = {
    "vtoken.copy_engine.triton_kernels",
    "vtoken.gpu_scores.triton_kernels",
    "vtoken.integration.vllm.attention_gpu_flashinfer",
}
IMPORT_ALL = f"""
import importlib, pathlib, sys
assert sys.modules["triton"] is None
for package in ("vtoken", "service"):
    for path in sorted(pathlib.Path(package).rglob("*.py")):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if name not in {sorted(NEED_TRITON)} and not name.endswith("__main__"):
            importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized()
print("imported")
"""


@pytest.fixture
def without_gpu(tmp_path):
    """Environment of a process that has neither Triton nor CUDA libraries."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ENVIRONMENT, **quiet, "PYTHONPATH": str(tmp_path)}


def run(command, env):
    """Its standard output; the test fails with its errors."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_all_modules_but_the_kernels_can_be_imported(without_gpu):
    """Also the GPU backends that stand on vLLM's own Triton code; only kernels need Triton."""
    assert run(["-c", IMPORT_ALL], without_gpu).strip().endswith("imported")


@pytest.mark.engine
def test_engine_evicts_and_relocates_without_triton(without_gpu, tmp_path):
    """A real engine, mode lazy: tokens are evicted and blocks are won back."""
    spec = {
        "model": str(ensure_tiny_model()),
        "vtoken": {
            "mode": "lazy",
            "policy": "random",
            "budget_tokens": 64,
            "recent_tokens": 8,
            "theta_f": 0.0,
            "low_watermark_ratio": 1.0,
        },
        "engine": {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 24},
        "workloads": [{"name": "some", "prompts": [[0, 200], [50, 150]], "max_tokens": 24}],
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    result = tmp_path / "result.json"
    run(["-m", "tests.engine.arm", str(tmp_path / "spec.json"), str(result)], without_gpu)
    counters = json.loads(result.read_text())["some"]["counters"]
    assert counters["evicted_tokens_total/random"] > 0
    assert counters["relocated_tokens_total"] > 0
