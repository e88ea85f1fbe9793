"""The worker of GPUs: memory that it keeps back, checks that it makes, names that it relies on.

The worker and its runners run in tests/engine/test_gpu_path.py, on a device that is faked.
"""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker

from vtoken.device_check import Finding
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm import gpu_worker, plugin
from vtoken.integration.vllm.gpu_layer import GpuTokenLayer

RIGHT, WRONG = Finding("copies", 0.0), Finding("reads", 2.0, 0.05)


class Stock:
    """vLLM's worker: writes down what it is asked for."""

    def __init__(self):
        self.calls = []
        self.findings = []
        self.available = 1000
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
        return self.available

    def initialize_from_config(self, kv_cache_config):
        self.calls.append(kv_cache_config)

    def compile_or_warm_up_model(self):
        self.calls.append("warm up")
        return "times"


class Checked(gpu_worker.GpuTokenLayerWorker, Stock):
    def __init__(self):
        Stock.__init__(self)


def test_memory_of_the_token_layer_is_kept_back(caplog):
    """vLLM measures before it is taken; a size that a user gave is not changed, only logged."""
    worker = Checked()
    worker.model_runner.buffer_bytes = lambda: 3 * 2**29
    stock = worker.available = 2**33
    with caplog.at_level("INFO"):
        assert worker.determine_available_memory() == stock - 3 * 2**29
    assert "1.50 GiB beside the KV cache, which are kept back" in caplog.text
    worker.cache_config.kv_cache_memory_bytes = stock
    with caplog.at_level("INFO"):
        assert worker.determine_available_memory() == stock
    assert "which kv_cache_memory_bytes must leave free" in caplog.text


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
    ("determine_available_memory", []),
    ("initialize_from_config", ["kv_cache_config"]),
    ("compile_or_warm_up_model", []),
    ("_make_model_runner", []),
]


@pytest.mark.parametrize(("name", "parameters"), OVERRIDDEN)
def test_vllms_methods_have_the_shape_that_was_read(name, parameters):
    """What we override or call: another shape means that its meaning must be read again."""
    assert list(inspect.signature(getattr(Worker, name)).parameters)[1:] == parameters


@pytest.mark.parametrize("is_v2", [True, False])
def test_the_runner_is_of_the_generation_that_vllm_chose(is_v2):
    """By the setting of vLLM that decides which of its own it would take."""
    worker = object.__new__(gpu_worker.VTokenGPUWorker)
    worker.use_v2_model_runner = is_v2
    worker.vllm_config = worker.device = None
    made = gpu_worker.gpu_runner_class(is_v2)
    assert issubclass(made, RunnerV2 if is_v2 else RunnerV1)
    assert issubclass(made, GpuTokenLayer)
    with mock.patch.object(made, "__init__", return_value=None):
        assert type(worker._make_model_runner()) is made


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
