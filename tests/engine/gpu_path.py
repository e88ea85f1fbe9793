"""An engine on the GPU path, without a GPU: everything but the device is what a GPU would run.

Our GPU runner and worker, Model Runner V2, vLLM's Triton attention on pages of one token, live
tables, the relocation and score kernels and the CUDA copy engine, all under Triton's interpreter;
streams are recorded and do their work at once. Run as
``python -m tests.engine.gpu_path SPEC.json RESULT.json``, with the specification of
:mod:`tests.engine.arm`. A workload ``{"name": …, "check": true}`` has the device checked again, by
each of :data:`MUTANTS`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.arm import Arm, prepare_environment


def main(spec_path: str, result_path: str) -> None:
    """As :func:`tests.engine.arm.main`, with another worker."""
    spec = json.loads(Path(spec_path).read_text())
    prepare_environment({**spec, "runner": "v2"})
    device = Device()
    spec["engine"]["worker_cls"] = use_gpu_path(device)
    arm = Arm(spec)
    results = {}
    for workload in spec["workloads"]:
        if workload.get("check"):
            results[workload["name"]] = checked(arm, device)
            continue
        del device.streams.log[:]
        result = results[workload["name"]] = arm.run(workload)
        result["stream_log"] = [entry[:2] for entry in device.streams.log]
    Path(result_path).write_text(json.dumps(results))


class Device:
    """What stands in for the GPU.

    Attributes:
        streams: recorded.
        move, score: the kernels, or mutants of them.
    """

    def __init__(self) -> None:
        self.streams = _fake_streams()
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
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import cudagraph_utils, warmup

    from vtoken.integration.vllm.attention_gpu_choice import GpuFacts
    from vtoken.integration.vllm.compat.runner_v2 import cpu_runner_class_v2
    from vtoken.integration.vllm.gpu_runner import VTokenGPUModelRunner
    from vtoken.integration.vllm.gpu_worker import GpuTokenLayerWorker

    # vLLM's cache write picks its tile by the GPU's generation.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)

    class GpuPathRunner(VTokenGPUModelRunner, CPUModelRunner):
        def tools(self) -> Any:
            return device.tools()

        def facts(self) -> GpuFacts:
            return GpuFacts((9, 0), None, False)

        def live_attention(self) -> tuple[str, str]:
            # vLLM's CPU platform offers layers one backend.
            return "CPU_ATTN", super().live_attention()[1]

    class StartsLikeCuda(CPUWorker):
        """What vLLM's GPU worker does at start and its CPU worker leaves out."""

        def determine_available_memory(self) -> int:
            # Around the capture of graphs that tells what they take.
            self.compilation_config.max_cudagraph_capture_size = 4
            cudagraph_utils._init_minimal_kv_cache_for_profiling(self.model_runner)
            assert self.model_runner.gpu is None, "nothing of ours may hold this cache"
            cudagraph_utils._teardown_profiling_state(self.model_runner)
            return super().determine_available_memory()

        def compile_or_warm_up_model(self) -> Any:
            # The larger of vLLM's warm-ups samples in ways that the interpreter cannot.
            assert warmup.run_mixed_prefill_decode_warmup(
                self.model_runner, self.execute_model, self.sample_tokens, num_tokens=24
            )
            return super().compile_or_warm_up_model()

    class GpuPathWorker(GpuTokenLayerWorker, StartsLikeCuda):
        def init_device(self) -> None:
            with cpu_runner_class_v2(GpuPathRunner):
                super().init_device()

    globals()["GpuPathWorker"] = GpuPathWorker
    return f"{__name__}.GpuPathWorker"


def checked(arm: Arm, device: Device) -> dict[str, Any]:
    """What the start found, and the first proof that fails with each mutant."""
    (worker,) = arm.core.model_executor.collective_rpc(_worker)
    runner, caught = worker.model_runner, {}
    for name, (check, mutant) in MUTANTS.items():
        with mutant(device, runner):
            findings = getattr(runner, check)()
            caught[name] = next((str(f) for f in findings if not f.ok), None)
            findings.close()
    return {
        "findings": [[f.name, f.value, f.limit, f.ok] for f in worker.findings],
        "caught": caught,
        "rows_left": len(runner.core.rows),
        "words_left": sum(int(layer.words.count_nonzero()) for layer in runner.gpu.pool.layers),
    }


def _worker(worker: Any) -> Any:
    return getattr(worker, "worker", worker)


@contextmanager
def _patched(of: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(of, name) for name in attributes}
    for name, value in attributes.items():
        setattr(of, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(of, name, value)


def _copy_off_by_one(device: Device, runner: Any) -> Any:
    """The relocation kernel reads the neighbour."""

    def move(family: Any, src: Any, dst: Any) -> None:
        move_by_kernel(family, (src + 1) % family.layers[0].num_slots, dst)

    return _patched(device, move=move)


def _copy_too_much(device: Device, runner: Any) -> Any:
    """The relocation kernel writes the neighbour, too."""

    def move(family: Any, src: Any, dst: Any) -> None:
        move_by_kernel(family, src[-1:], (dst[-1:] + 1) % family.layers[0].num_slots)
        move_by_kernel(family, src, dst)

    return _patched(device, move=move)


def _copy_late(device: Device, runner: Any) -> Any:
    """The relocation stream runs one batch behind: nobody waited for it."""
    waiting: list[Any] = []

    def move(*args: Any) -> None:
        if waiting:
            move_by_kernel(*waiting.pop())
        waiting.append(args)

    return _patched(device, move=move)


def _wrong_scores(device: Device, runner: Any) -> Any:
    """The score kernel is off in the third digit."""
    return _patched(device, score=lambda *args: mass_by_kernel(*args) * 1.01)


def _nan_scores(device: Device, runner: Any) -> Any:
    return _patched(device, score=lambda *args: mass_by_kernel(*args) * float("nan"))


def _tables(runner: Any) -> Any:
    (builder,) = runner.metadata_builders()
    return builder._tables


def _positional_reads(device: Device, runner: Any) -> Any:
    """The kernel reads the first slots of the cache instead of those of its table."""
    tables = _tables(runner)
    fill = tables.fill

    def first_slots(live: Any, lens_cpu: Any) -> None:
        import torch

        fill(live, lens_cpu)
        tables.table.copy_(torch.arange(tables.table.shape[1], dtype=torch.int32))

    return _patched(tables, fill=first_slots)


def _stale_tables(device: Device, runner: Any) -> Any:
    """A graph that reads the table of its capture: the first batch, for ever."""
    tables = _tables(runner)
    fill, filled = tables.fill, []

    def once(live: Any, lens_cpu: Any) -> None:
        if not filled:
            fill(live, lens_cpu)
            filled.append((tables.table.clone(), tables.lens.clone()))
        fill(live, lens_cpu)
        tables.table.copy_(filled[0][0])
        tables.lens.copy_(filled[0][1])

    return _patched(tables, fill=once)


def _one_token_less(device: Device, runner: Any) -> Any:
    """The oldest live token of every request is not read."""
    tables = _tables(runner)
    fill = tables.fill

    def shifted(live: Any, lens_cpu: Any) -> None:
        fill(live, lens_cpu)
        tables.table[:, :-1] = tables.table[:, 1:].clone()
        tables.lens.sub_((tables.lens > 1).int())

    return _patched(tables, fill=shifted)


def _nan_output(device: Device, runner: Any) -> Any:
    """The kernel answers with NaN."""
    names = list(runner.gpu.layers)
    impl = runner.attention_layers(names)[names[0]].impl
    forward = impl.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).fill_(float("nan"))

    return _patched(impl, forward=broken)


MUTANTS: dict[str, tuple[str, Callable[[Device, Any], Any]]] = {
    "copies nothing": ("check_parts", lambda device, runner: _patched(device, move=forget)),
    "copies the neighbour": ("check_parts", _copy_off_by_one),
    "overwrites a neighbour": ("check_parts", _copy_too_much),
    "copies one batch late": ("check_parts", _copy_late),
    "scores are off": ("check_parts", _wrong_scores),
    "scores are NaN": ("check_parts", _nan_scores),
    "reads positions": ("check_parts", _positional_reads),
    "leaves a token out": ("check_parts", _one_token_less),
    "answers with NaN": ("check_parts", _nan_output),
    "reads the table of its capture": ("check_steps", _stale_tables),
    "copies nothing, in whole steps": (
        "check_steps",
        lambda device, runner: _patched(device, move=forget),
    ),
}
"""What a broken device would do, and who has to notice it."""


def _fake_streams() -> Any:
    path = Path(__file__).parents[1] / "copy_engine" / "fake_streams.py"
    spec = importlib.util.spec_from_file_location("fake_streams", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeStreams()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
