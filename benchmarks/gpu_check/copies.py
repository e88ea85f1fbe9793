"""The relocation kernel: its bytes, its bandwidth, and the order of streams around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu_check.machine import Machine, Sizes
from benchmarks.gpu_check.report import Row
from vtoken import device_check
from vtoken.copy_engine.base import CopyEngine
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import Mover, PagedPool, move_by_index

SECTION = "copies"
LAYOUTS = {
    # Order in memory of (layer, block, head, token, content).
    "LBNHC": (0, 1, 3, 2, 4),
    "LBHNC": (0, 1, 2, 3, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
DTYPES = (torch.bfloat16, torch.float16, torch.uint8)
"""uint8 stands for fp8, which is stored as bytes."""


def make_layers(
    sizes: Sizes, layout: str, dtype: torch.dtype, device: torch.device, page: int = 16
) -> list[torch.Tensor]:
    """Every layer's ``[B, H, N, C]`` view of one allocation with random bytes."""
    shape = (
        sizes.num_layers,
        sizes.num_slots // page,
        sizes.num_kv_heads,
        page,
        2 * sizes.head_size,
    )
    order = LAYOUTS[layout]
    memory = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    memory.view(torch.uint8).random_(0, 256)
    logical = memory.permute([order.index(axis) for axis in range(5)])
    return list(logical.unbind(0))


def make_moves(num_slots: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` scattered sources and packed destinations, disjoint."""
    order = torch.randperm(num_slots - count)
    return order[:count] + count, torch.arange(count)


def check_bytes(machine: Machine, mover: Mover) -> Iterator[Row]:
    """The kernel against torch, in every layout and dtype; two layers are enough."""
    blocks = min(64, machine.sizes.num_blocks)
    sizes = replace(machine.sizes, num_layers=2, num_blocks=blocks)
    wrong = []
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for page in (16, 1) if layout in ("LBNHC", "LBHNC") else (16,):
                caches = make_layers(sizes, layout, dtype, machine.device, page)
                twins = [PagedKV.from_cache(cache.clone()) for cache in caches]
                pool = PagedPool([PagedKV.from_cache(cache) for cache in caches], mover)
                twin = PagedPool(twins, move_by_index)
                count = min(100, sizes.num_slots // 4)
                src, dst = (part.to(machine.device) for part in make_moves(sizes.num_slots, count))
                pool.copy(src, dst)
                twin.copy(src, dst)
                everything = torch.arange(sizes.num_slots)
                if pool.digest(everything) != twin.digest(everything):
                    wrong.append(f"{layout} {dtype} page {page}")
    note = f"wrong: {', '.join(wrong)}" if wrong else "6 layouts × bf16, fp16, bytes"
    yield Row(
        SECTION, "kernel equals torch byte by byte", len(wrong), "wrong", not wrong, note=note
    )


def measure_bandwidth(machine: Machine, movers: dict[str, Mover]) -> Iterator[Row]:
    """Each mover against the device's own copy of as many bytes, contiguous to contiguous."""
    sizes, device = machine.sizes, machine.device
    caches = make_layers(sizes, "LBNHC", torch.bfloat16, device, page=1)
    layers = [PagedKV.from_cache(cache) for cache in caches]
    for count in sizes.move_counts:
        src, dst = (part.to(device) for part in make_moves(sizes.num_slots, count))
        num_bytes = count * PagedPool(layers).bytes_per_token
        plain = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(plain)
        own = machine.median_seconds(lambda to=target, of=plain: to.copy_(of))
        for name, mover in movers.items():
            pool = PagedPool(layers, mover)
            taken = machine.median_seconds(lambda pool=pool, src=src, dst=dst: pool.copy(src, dst))
            label = f"{name}, {count} tokens ({num_bytes / 2**20:.0f} MiB)"
            goal = "goal ≥ 0.8" if name == "kernel" and count >= 512 else ""
            yield Row(SECTION, label, taken * 1e6, "µs")
            yield Row(SECTION, f"{label}: share of own copy", own / taken, goal=goal)


def check_order(engine: CopyEngine, pool: PagedPool, rounds: int) -> Iterator[Row]:
    """Sources written right before, destinations read right after: every round must agree."""
    finding = device_check.check_order(pool, engine, rounds, count=2048)
    yield Row(SECTION, finding.name, finding.value, ok=finding.ok, note=finding.note)


def measure_stall(
    engine: CopyEngine,
    pool: PagedPool,
    count: int,
    work: Callable[[], object],
    rounds: int,
    finish: Callable[[], object],
) -> Iterator[Row]:
    """Copy time and stall where compute has ``work`` between submit and wait, and where not.

    Args:
        engine: over ``pool``.
        pool: to move tokens in.
        count: tokens per batch.
        work: queued on the compute stream while the copies run.
        rounds: batches.
        finish: waits for the device.
    """
    arrays = [part.numpy().astype(np.int32) for part in make_moves(pool.num_slots, count)]
    for label, between in {"behind compute work": work, "waited for at once": lambda: None}.items():
        # Times travel with later results, see CudaCopyEngine: the second half carries the first's.
        for ticket in range(2 * rounds):
            if ticket == rounds:
                finish()
                engine.poll()
            engine.submit(ticket, *arrays)
            between()
            engine.wait_before_read()
        finish()
        results = engine.poll()
        copy = float(np.median([result.copy_seconds for result in results]))
        stall = float(np.median([result.stall_seconds for result in results]))
        yield Row(SECTION, f"copy, {count} tokens {label}", copy * 1e6, "µs")
        yield Row(SECTION, f"stall, {count} tokens {label}", stall * 1e6, "µs")
