"""Proves and measures on a GPU what a CPU cannot: run as ``scripts/gpu_check [--out FILE]``.

Exit status: 0 if every proof held, 1 if one failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_check.report import Row, document, failed, table, wrong

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu_check.machine import Machine, Sizes

MINUTES = 8.0
"""What the whole check may take; the engine's tests get what the others leave."""

Check = Callable[["Machine"], Iterable[Row]]


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; see the module for the result."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--no-engine", action="store_true", help="leave the engine's tests out")
    options = parser.parse_args(arguments)
    reason = why_no_cuda()
    if reason is not None:
        print(f"gpu_check needs a CUDA device: {reason}.", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * MINUTES
    rows = list(run_all(options.no_engine, deadline))
    print(table(rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document(rows), indent=1) + "\n")
    return 1 if wrong(rows) else 0


def why_no_cuda() -> str | None:
    """In a few words, or None if there is a device."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed for this Python"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds none"
    return None


def run_all(no_engine: bool, deadline: float) -> Iterator[Row]:
    """Everything, on the first CUDA device; one failing check does not end the others."""
    import torch

    from benchmarks.gpu_check import machine as machines
    from benchmarks.gpu_check.engine_tests import run_engine_tests

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    machine = machines.Machine(device, fitting(device), machines.cuda_seconds)
    yield from facts(machine)
    for name, check in cuda_checks().items():
        yield from guarded(name, check, machine)
        torch.cuda.empty_cache()
    if not no_engine:
        yield from run_engine_tests(max(30.0, deadline - time.monotonic()))


def cuda_checks() -> dict[str, Check]:
    """What runs in this process, by section."""
    return {
        "copies": _copies,
        "streams": _streams,
        "tables": _tables,
        "attention": _attention,
        "scores": _scores,
    }


def guarded(section: str, check: Check, machine: Machine) -> Iterator[Row]:
    """The rows of a check; an error becomes a failed row."""
    try:
        yield from check(machine)
    except Exception as error:  # a report with a hole is worth more than none
        yield failed(section, "check", error)


def fitting(device: torch.device) -> Sizes:
    """Sizes of Llama-3.1-8B, with a pool that takes at most a third of the device's memory."""
    import torch

    from benchmarks.gpu_check.machine import LLAMA_8B

    sizes = LLAMA_8B
    per_block = 16 * sizes.num_layers * 2 * sizes.num_kv_heads * sizes.head_size * 2
    total = torch.cuda.get_device_properties(device).total_memory
    return replace(sizes, num_blocks=min(sizes.num_blocks, total // 3 // per_block))


def facts(machine: Machine) -> Iterator[Row]:
    """What was tested."""
    import torch

    properties = torch.cuda.get_device_properties(machine.device)
    yield Row("machine", "GPU", properties.name)
    yield Row("machine", "compute capability", f"{properties.major}.{properties.minor}")
    yield Row("machine", "memory", properties.total_memory / 2**30, "GiB")
    for package in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield Row("machine", package, version)


def _copies(machine: Machine) -> Iterator[Row]:
    from benchmarks.gpu_check.copies import check_bytes, measure_bandwidth
    from vtoken.copy_engine.triton_kernels import move_by_kernel
    from vtoken.paged_pool import move_by_index

    yield from check_bytes(machine, move_by_kernel)
    movers = {"kernel": move_by_kernel, "torch": move_by_index}
    yield from measure_bandwidth(machine, movers)


def _streams(machine: Machine) -> Iterator[Row]:
    import torch

    from benchmarks.gpu_check.copies import check_order, make_layers, measure_stall
    from vtoken.copy_engine.cuda import CudaCopyEngine, CudaStreams
    from vtoken.copy_engine.triton_kernels import move_by_kernel
    from vtoken.kv_pages import PagedKV
    from vtoken.paged_pool import PagedPool

    caches = make_layers(machine.sizes, "LBNHC", torch.bfloat16, machine.device, page=1)
    layers = [PagedKV.from_cache(cache) for cache in caches]
    few = PagedPool(layers[:2], move_by_kernel)
    yield from check_order(CudaCopyEngine(few, CudaStreams(machine.device)), few, 200)
    pool = PagedPool(layers, move_by_kernel)
    matrix = torch.randn(4096, 4096, device=machine.device, dtype=torch.bfloat16)
    engine = CudaCopyEngine(pool, CudaStreams(machine.device))
    for count in machine.sizes.move_counts:
        finish = torch.cuda.synchronize
        yield from measure_stall(engine, pool, count, lambda: matrix @ matrix, 50, finish)


def _tables(machine: Machine) -> Iterator[Row]:
    from benchmarks.gpu_check.tables import check_graph, check_tables

    yield from check_tables(machine)
    yield from check_graph(machine)


def _attention(machine: Machine) -> Iterator[Row]:
    import torch

    from benchmarks.gpu_check.attention import check_attention, installed_kernels

    kernels, missing = installed_kernels(torch.cuda.get_device_capability(machine.device))
    yield from missing
    yield from check_attention(machine, kernels)


def _scores(machine: Machine) -> Iterator[Row]:
    from benchmarks.gpu_check.scores import check_scores
    from vtoken.gpu_scores.triton_kernels import mass_by_kernel

    yield from check_scores(machine, mass_by_kernel)


if __name__ == "__main__":
    sys.exit(main())
