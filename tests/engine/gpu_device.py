"""A faked GPU: recorded streams, kernels under Triton's interpreter, and a worker for them.

Our GPU runners and our GPU worker are mixed with vLLM's CPU ones; what vLLM's GPU worker does at
start, and its CPU worker leaves out, is done here with vLLM's own functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


class Device:
    """What stands in for the GPU.

    Attributes:
        streams: recorded.
        move, score: the kernels, or mutants of them.
    """

    def __init__(self) -> None:
        self.streams = fake_streams()
        self.move: Callable[..., None] = move_by_kernel
        self.score: Callable[..., Any] = mass_by_kernel

    def tools(self) -> Any:
        """As :func:`vtoken.integration.vllm.gpu_core.cuda_tools`."""
        from vtoken.integration.vllm.gpu_core import GpuTools

        def move(*args: Any) -> None:
            self.streams.log.append(("copy", self.streams.current.name))
            self.move(*args)

        def score(*args: Any) -> Any:
            self.streams.log.append(("score", self.streams.current.name))
            return self.score(*args)

        return GpuTools(self.streams, move, score, lambda: False)


def move_by_kernel(*args: Any) -> None:
    """The relocation kernel."""
    from vtoken.copy_engine import triton_kernels

    triton_kernels.move_by_kernel(*args)


def mass_by_kernel(*args: Any) -> Any:
    """The score kernel."""
    from vtoken.gpu_scores import triton_kernels

    return triton_kernels.mass_by_kernel(*args)


def forget(family: Any, src: Any, dst: Any) -> None:
    """A mutant: relocations copy nothing."""


def use_gpu_path(device: Device) -> str:
    """Make the worker below; its dotted name."""
    import torch
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vtoken.integration.vllm.compat.runner_v2 import cpu_runner_class_v2
    from vtoken.integration.vllm.compat.worker_side import cpu_runner_class
    from vtoken.integration.vllm.gpu_worker import GpuTokenLayerWorker

    # vLLM's cache write picks its tile by the GPU's generation.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

    class StartsLikeCuda(CPUWorker):
        """What vLLM's GPU worker does at start and its CPU worker leaves out."""

        def determine_available_memory(self) -> int:
            # Around the capture of graphs that tells what they take.
            self.compilation_config.max_cudagraph_capture_size = 4
            profile = profile_v2 if self.use_v2_model_runner else profile_v1
            profile(self.model_runner)
            return super().determine_available_memory()

        def compile_or_warm_up_model(self) -> Any:
            warm_up = warm_up_v2 if self.use_v2_model_runner else warm_up_v1
            warm_up(self)
            return super().compile_or_warm_up_model()

    class GpuPathWorker(GpuTokenLayerWorker, StartsLikeCuda):
        def init_device(self) -> None:
            runner = on_faked(device, self.use_v2_model_runner)
            take = cpu_runner_class_v2 if self.use_v2_model_runner else cpu_runner_class
            with take(runner), faked_cuda():
                super().init_device()

    globals()["GpuPathWorker"] = GpuPathWorker
    return f"{__name__}.GpuPathWorker"


def on_faked(device: Device, is_v2: bool) -> type:
    """Our GPU runner of a generation, over vLLM's CPU runner of that generation."""
    from vllm.v1.worker.cpu import model_runner as v2
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from vtoken.integration.vllm.attention_gpu_choice import GpuFacts
    from vtoken.integration.vllm.gpu_worker import gpu_runner_class

    class GpuPathRunner(gpu_runner_class(is_v2), v2.CPUModelRunner if is_v2 else CPUModelRunner):
        def tools(self) -> Any:
            return device.tools()

        def facts(self) -> GpuFacts:
            return GpuFacts((9, 0), None, False)

        def live_attention(self) -> tuple[str, str]:
            # vLLM's CPU platform offers layers one backend.
            return "CPU_ATTN", super().live_attention()[1]

        def sample_tokens(self, grammar_output: Any) -> Any:
            with faked_cuda():
                return super().sample_tokens(grammar_output)

    return GpuPathRunner


def profile_v2(runner: Any) -> None:
    """A small cache, which goes again."""
    from vllm.v1.worker.gpu import cudagraph_utils

    cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
    assert runner.gpu is None, "nothing of ours may hold this cache"
    cudagraph_utils._teardown_profiling_state(runner)


def profile_v1(runner: Any) -> None:
    """A small cache, read at positions as graphs are captured, which goes again."""
    from vllm.config import CUDAGraphMode, set_current_vllm_config

    with set_current_vllm_config(runner.vllm_config):
        runner._init_minimal_kv_cache_for_profiling()
        runner._dummy_run(2, CUDAGraphMode.NONE, force_attention=True, uniform_decode=True)
    assert runner.gpu is None, "nothing of ours may hold this cache"
    runner._cleanup_profiling_kv_cache()


def warm_up_v2(worker: Any) -> None:
    """Requests of vLLM's own. The larger of its warm-ups samples as the interpreter cannot."""
    from vllm.v1.worker.gpu import warmup

    assert warmup.run_mixed_prefill_decode_warmup(
        worker.model_runner, worker.execute_model, worker.sample_tokens, num_tokens=24
    )


def warm_up_v1(worker: Any) -> None:
    """Dummy runs: of kernels, of a capture with its warm-up, and the one for the sampler, whose own
    kernel the interpreter cannot run."""
    from vllm.config import CUDAGraphMode, set_current_vllm_config

    runner, eager = worker.model_runner, CUDAGraphMode.NONE
    with set_current_vllm_config(worker.vllm_config):
        runner._dummy_run(24, eager, force_attention=True, create_mixed_batch=True)
        for is_capture in (False, True):
            runner._dummy_run(
                4,
                eager,
                force_attention=True,
                uniform_decode=True,
                is_graph_capturing=is_capture,
            )
        runner._dummy_run(4, eager, skip_eplb=True)


@contextmanager
def faked_cuda() -> Iterator[None]:
    """Streams and events of ``torch.cuda`` for V1, whose outputs wait for theirs to arrive."""
    import torch

    class Nothing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.record = self.synchronize = self.wait_stream = lambda *args: None

    with patched(
        torch.cuda,
        Event=Nothing,
        Stream=Nothing,
        current_stream=Nothing,
        stream=lambda stream: nullcontext(),
    ):
        yield


@contextmanager
def patched(of: Any, **attributes: Any) -> Iterator[None]:
    """Other attributes of ``of`` inside the block."""
    before = {name: getattr(of, name) for name in attributes}
    for name, value in attributes.items():
        setattr(of, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(of, name, value)


def fake_streams() -> Any:
    """Of the copy engine's tests."""
    path = Path(__file__).parents[1] / "copy_engine" / "fake_streams.py"
    spec = importlib.util.spec_from_file_location("fake_streams", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeStreams()
