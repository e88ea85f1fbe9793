"""The worker of GPUs: memory that it keeps back, checks that it makes, names that it relies on.

The worker and its runner run in tests/engine/test_gpu_path.py, on a device that is faked.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
from vllm.config.attention import AttentionConfig
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vtoken.device_check import Finding
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm import gpu_worker, plugin
from vtoken.integration.vllm.gpu_runner import VTokenGPUModelRunner

RIGHT, WRONG = Finding("copies", 0.0), Finding("reads", 2.0, 0.05)


class Stock:
    """vLLM's worker: writes down what it is asked for."""

    def __init__(self):
        self.calls = []
        self.findings = []
        self.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
        self.model_runner = SimpleNamespace(
            buffer_bytes=lambda: 300,
            check_parts=lambda: self.check("parts"),
            check_steps=lambda: self.check("steps"),
        )
        self.found = {"parts": [RIGHT], "steps": [RIGHT]}

    def check(self, what):
        self.calls.append(f"check {what}")
        return iter(self.found[what])

    def determine_available_memory(self):
        return 1000

    def initialize_from_config(self, kv_cache_config):
        self.calls.append(kv_cache_config)

    def compile_or_warm_up_model(self):
        self.calls.append("warm up")
        return "times"


class Checked(gpu_worker.GpuTokenLayerWorker, Stock):
    def __init__(self):
        Stock.__init__(self)


def test_memory_of_tables_and_queries_is_kept_back():
    """vLLM measures before they exist; a size that a user gave is not changed."""
    worker = Checked()
    assert worker.determine_available_memory() == 700
    worker.cache_config.kv_cache_memory_bytes = 1000
    assert worker.determine_available_memory() == 1000


def test_checks_follow_what_they_need():
    """Parts once there is a cache, whole steps once graphs are captured."""
    worker = Checked()
    worker.initialize_from_config("cache")
    assert worker.compile_or_warm_up_model() == "times"
    assert worker.calls == ["cache", "check parts", "warm up", "check steps"]
    assert worker.findings == [RIGHT, RIGHT]


@pytest.mark.parametrize("what", ["parts", "steps"])
def test_a_failed_check_refuses_to_start(what, caplog):
    """With the numbers, in the error and in the log."""
    worker = Checked()
    worker.found[what] = [RIGHT, WRONG]
    start = {"parts": lambda: worker.initialize_from_config("cache")}
    with pytest.raises(UnsupportedError, match=r"reads: 2 \(limit 0\.05\)"):
        start.get(what, worker.compile_or_warm_up_model)()
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        "vToken checked this device: reads: 2 (limit 0.05)"
    ]


OVERRIDDEN = [
    (Worker, "determine_available_memory", []),
    (Worker, "initialize_from_config", ["kv_cache_config"]),
    (Worker, "compile_or_warm_up_model", []),
    (Worker, "_make_model_runner", []),
    (GPUModelRunner, "__init__", ["vllm_config", "device"]),
    (GPUModelRunner, "load_model", ["load_dummy_weights", "args", "model", "kwargs"]),
    (
        GPUModelRunner,
        "initialize_kv_cache",
        ["kv_cache_config", "is_profiling", "kv_cache_allocation_context"],
    ),
    (
        GPUModelRunner,
        "execute_model",
        [
            "scheduler_output",
            "intermediate_tensors",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "is_profile",
            "context_len",
            "valid_dummy_state_slots",
            "randomize_inputs",
        ],
    ),
    (GPUModelRunner, "sample_tokens", ["grammar_output"]),
    (GPUModelRunner, "finish_requests", ["scheduler_output"]),
    (GPUModelRunner, "update_requests", ["scheduler_output"]),
    (GPUModelRunner, "prepare_attn", ["input_batch"]),
    (GPUModelRunner, "shutdown", []),
]


@pytest.mark.parametrize(("of", "name", "parameters"), OVERRIDDEN)
def test_vllms_methods_have_the_shape_that_was_read(of, name, parameters):
    """What we override or call: another shape means that its meaning must be read again."""
    found = list(inspect.signature(getattr(of, name)).parameters)[1:]
    assert found == parameters


def test_every_method_of_vllm_that_we_override_is_listed():
    """Nothing is overridden by accident, and nothing goes unread."""
    ours = [cls for cls in VTokenGPUModelRunner.__mro__ if cls.__module__.startswith("vtoken.")]
    names = {name for cls in ours for name, of in vars(cls).items() if inspect.isfunction(of)}
    listed = {name for of, name, _ in OVERRIDDEN if of is GPUModelRunner}
    assert {name for name in names if hasattr(GPUModelRunner, name)} <= listed


def test_what_the_checks_read_of_vllm_is_there():
    """Fields of its plain data."""
    assert {"input_batch", "hidden_states"} <= set(ExecuteModelState._fields)
    for of, wanted in {
        AttentionConfig: {"backend", "backend_per_kind", "use_trtllm_attention"},
        NewRequestData: {"prefill_token_ids", "block_ids", "num_computed_tokens"},
        CachedRequestData: {"num_computed_tokens", "num_output_tokens", "new_block_ids"},
    }.items():
        assert wanted <= {field.name for field in dataclasses.fields(of)}


@pytest.mark.parametrize(("is_cuda", "path"), [(True, "gpu_worker"), (False, "worker")])
def test_the_worker_follows_the_platform(monkeypatch, is_cuda, path):
    """The engine's arguments name the one of GPUs on CUDA only."""
    from vllm import platforms

    from vtoken.config import VTokenConfig

    monkeypatch.setattr(
        platforms, "_current_platform", SimpleNamespace(is_cuda=lambda: is_cuda), raising=False
    )
    name = plugin.engine_args(VTokenConfig(mode="lazy"))["worker_cls"]
    assert name.startswith(f"vtoken.integration.vllm.{path}.VToken")
