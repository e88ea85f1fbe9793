"""An engine on the GPU path, without a GPU: everything but the device is what a GPU would run.

Our GPU runner of either generation and our worker, asynchronous scheduling, vLLM's Triton attention
on pages of one token, live tables, the relocation and score kernels and the CUDA copy engine, all
under Triton's interpreter; streams are recorded and do their work at once. Run as
``python -m tests.engine.gpu_path SPEC.json RESULT.json``, with the specification of
:mod:`tests.engine.arm`. A workload ``{"name": …, "check": [mutant, …]}`` has the device checked
again, with each of these :data:`MUTANTS`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.arm import Arm, prepare_environment
from tests.engine.gpu_device import (
    Device,
    forget,
    mass_by_kernel,
    move_by_kernel,
    patched,
    use_gpu_path,
)


def main(spec_path: str, result_path: str) -> None:
    """As :func:`tests.engine.arm.main`, with another worker."""
    spec = json.loads(Path(spec_path).read_text())
    prepare_environment({**spec, "runner": "v2"})  # V1 on a GPU needs Triton as well
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if spec["runner"] == "v2" else "0"
    device = Device()
    spec["engine"]["worker_cls"] = use_gpu_path(device)
    arm = Arm(spec)
    results = {}
    for workload in spec["workloads"]:
        if workload.get("check"):
            results[workload["name"]] = checked(arm, device, workload["check"])
            continue
        del device.streams.log[:]
        result = results[workload["name"]] = arm.run(workload)
        result["stream_log"] = [entry[:2] for entry in device.streams.log]
        result["runner"] = [_path(cls) for cls in type(_runner(arm)).__mro__]
    Path(result_path).write_text(json.dumps(results))


def checked(arm: Arm, device: Device, mutants: list[str]) -> dict[str, Any]:
    """What the start found, and the first proof that fails with each mutant."""
    runner, caught = _runner(arm), {}
    for name in mutants:
        check, mutant = MUTANTS[name]
        with mutant(device, runner):
            findings = getattr(runner, check)()
            caught[name] = next((str(f) for f in findings if not f.ok), None)
            findings.close()
    return {
        "findings": [[f.name, f.value, f.limit, f.ok] for f in _worker(arm).findings],
        "caught": caught,
        "rows_left": len(runner.core.rows),
        "words_left": sum(int(layer.words.count_nonzero()) for layer in runner.gpu.pool.layers),
    }


def _worker(arm: Arm) -> Any:
    (worker,) = arm.core.model_executor.collective_rpc(lambda worker: worker)
    return getattr(worker, "worker", worker)


def _runner(arm: Arm) -> Any:
    return _worker(arm).model_runner


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _copy_off_by_one(device: Device, runner: Any) -> Any:
    """The relocation kernel reads the neighbour."""

    def move(family: Any, src: Any, dst: Any) -> None:
        move_by_kernel(family, (src + 1) % family.layers[0].num_slots, dst)

    return patched(device, move=move)


def _copy_too_much(device: Device, runner: Any) -> Any:
    """The relocation kernel writes the neighbour, too."""

    def move(family: Any, src: Any, dst: Any) -> None:
        move_by_kernel(family, src[-1:], (dst[-1:] + 1) % family.layers[0].num_slots)
        move_by_kernel(family, src, dst)

    return patched(device, move=move)


def _copy_late(device: Device, runner: Any) -> Any:
    """The relocation stream runs one batch behind: nobody waited for it."""
    waiting: list[Any] = []

    def move(*args: Any) -> None:
        if waiting:
            move_by_kernel(*waiting.pop())
        waiting.append(args)

    return patched(device, move=move)


def _wrong_scores(device: Device, runner: Any) -> Any:
    """The score kernel is off in the third digit."""
    return patched(device, score=lambda *args: mass_by_kernel(*args) * 1.01)


def _nan_scores(device: Device, runner: Any) -> Any:
    return patched(device, score=lambda *args: mass_by_kernel(*args) * float("nan"))


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

    return patched(tables, fill=first_slots)


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

    return patched(tables, fill=once)


def _one_token_less(device: Device, runner: Any) -> Any:
    """The oldest live token of every request is not read."""
    tables = _tables(runner)
    fill = tables.fill

    def shifted(live: Any, lens_cpu: Any) -> None:
        fill(live, lens_cpu)
        tables.table[:, :-1] = tables.table[:, 1:].clone()
        tables.lens.sub_((tables.lens > 1).int())

    return patched(tables, fill=shifted)


def _nan_output(device: Device, runner: Any) -> Any:
    """The kernel answers with NaN."""
    names = list(runner.gpu.layers)
    impl = runner.attention_layers(names)[names[0]].impl
    forward = impl.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).fill_(float("nan"))

    return patched(impl, forward=broken)


MUTANTS: dict[str, tuple[str, Callable[[Device, Any], Any]]] = {
    "copies nothing": ("check_parts", lambda device, runner: patched(device, move=forget)),
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
        lambda device, runner: patched(device, move=forget),
    ),
}
"""What a broken device would do, and who has to notice it."""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
