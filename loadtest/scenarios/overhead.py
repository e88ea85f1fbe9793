"""What the token layer costs a decode, against stock vLLM, alone and beside a busy neighbour.

Arms: ``stock`` (mode off), ``indirection`` (naive, policy none: the live-slot path and nothing
else), and half of the tokens evicted without and with repacking. ``+hog``: two processes that do
nothing but compute run beside the service, as a co-located workload would. *Synchronous*: the step
waits for each batch of copies, by a plugin of vLLM that comes with the repository. Nobody looks at
the engine while it works, and services read it as often as they do by default.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench import Bench, Load, Run, abba
from loadtest.fleet import DEFAULT_POLL_SECONDS, Arm, Engine
from loadtest.outcome import Outcome
from loadtest.probe import histogram_increase
from loadtest.scenarios.capacity import RECLAIM_EAGERLY, speed, work
from loadtest.scenarios.inputs import SYNTHETIC, make_jobs, sources
from loadtest.workloads import Lengths

SYNCHRONOUS_COPIES = Path(__file__).resolve().parents[2] / "benchmarks" / "synchronous_copies"
HALF_KEPT: dict[str, Any] = {
    "policy": "random",
    "keep_ratio": 0.5,
    "theta_f": 0.0,
    **RECLAIM_EAGERLY,
}
"""Relocation is as busy as it can be."""
INDIRECTION = "indirection"
LAZY, SYNCHRONOUS = "lazy, half kept", "lazy, half kept, synchronous"
STALL = "vtoken_relocation_stall_seconds"
PARTS = ("scheduler_overhead", "worker_overhead", "relocation_copy", "relocation_stall")
PAPER = "indirection alone below 1 % at 16 and 48 requests (H100)"
PLOTS = ({"metric": "mean_tpot_ms", "title": "Time per output token, ms", "x": "prompt tokens"},)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    contexts: tuple[int, ...]
    num_requests: int
    num_output_tokens: int
    repeats: int
    hog_contexts: tuple[int, ...]
    num_blocks: int = 1200
    with_synchronous: bool = False
    poll_seconds: float = DEFAULT_POLL_SECONDS


SIZES = {
    "full": Size((256, 512, 1024, 1500), 8, 128, 10, (512,), with_synchronous=True),
    "quick": Size((512,), 8, 64, 4, ()),
    "smoke": Size((96,), 2, 24, 1, (), poll_seconds=Engine().poll_seconds),
}


def make_engine(size: Size) -> Engine:
    """As all arms have it; stock's blocks are larger, and synchronous copies are a plugin."""
    return Engine(num_blocks=size.num_blocks, poll_seconds=size.poll_seconds)


def make_arms(size: Size) -> dict[str, Arm]:
    """The configurations.

    Raises:
        RuntimeError: synchronous copies are wanted, but this is no repository.
    """
    engine = make_engine(size)
    arms = {
        "stock": Arm("stock", "off", {}, engine),
        INDIRECTION: Arm(INDIRECTION, "naive", {"policy": "none"}, engine),
        "naive, half kept": Arm("naive, half kept", "naive", HALF_KEPT, engine),
        LAZY: Arm(LAZY, "lazy", HALF_KEPT, engine),
    }
    if size.with_synchronous:
        if not SYNCHRONOUS_COPIES.exists():
            raise RuntimeError("the plugin for synchronous copies comes with the repository only")
        own = replace(engine, python_path=str(SYNCHRONOUS_COPIES))
        arms[SYNCHRONOUS] = Arm(SYNCHRONOUS, "lazy", HALF_KEPT, own)
    return arms


async def run(bench: Bench) -> Outcome:
    """Measure every arm at every context length."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(
        Outcome(config=_describe(size, repeats), details={"paper": PAPER, "stalls": {}})
    )
    for with_hog, contexts in ((False, size.contexts), (True, size.hog_contexts)):
        for context in contexts:
            await _measure(bench, size, outcome, context, repeats, with_hog=with_hog)
    outcome.not_measured.append("GPUs: neither an overlap of streams nor graphs exists on a CPU.")
    return outcome


async def _measure(
    bench: Bench, size: Size, outcome: Outcome, context: int, repeats: int, *, with_hog: bool
) -> None:
    arms = make_arms(size)
    suffix = f"{'+hog' if with_hog else ''}@{context}"
    lengths = Lengths(size.num_requests, context, size.num_output_tokens)
    for repeat, name in abba(list(arms), repeats):
        tokenizer = await bench.fleet.service(arms[name])
        few = lengths if repeat >= 0 else replace(lengths, num_output_tokens=2)
        jobs = await make_jobs(SYNTHETIC, tokenizer, few, max(repeat, 0))
        with hog() if with_hog else contextlib.nullcontext():
            result = await bench.run(arms[name], jobs, Load(), repeat, watch=False)
        if repeat >= 0:
            outcome.add(name + suffix, {**speed(result), **work(result), **_layer(result)})
            _add_stalls(outcome.details["stalls"], name + suffix, result)
    metrics = ("mean_tpot_ms", "mean_itl_ms", "output_throughput")
    for name in arms:
        if name != "stock":
            outcome.compare(name + suffix, f"stock{suffix}", metrics)
        if name not in ("stock", INDIRECTION):
            outcome.compare(name + suffix, INDIRECTION + suffix, metrics)
    if SYNCHRONOUS in arms:
        outcome.compare(LAZY + suffix, SYNCHRONOUS + suffix, metrics)


@contextlib.contextmanager
def hog(num_processes: int | None = None) -> Iterator[None]:
    """Processes that compute for nothing while the block runs: one per core unless told."""
    command = [sys.executable, "-c", "while True: pass"]
    count = num_processes or os.cpu_count() or 1
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _layer(result: Run) -> dict[str, float]:
    """Mean milliseconds of the token layer's parts, as it measures itself; none in mode off."""
    found = {}
    for part in PARTS:
        name = f"vtoken_{part}_seconds"
        if count := result.gained(f"{name}_count"):
            found[f"mean_{part}_ms"] = 1e3 * result.gained(f"{name}_sum") / count
            if part == "relocation_copy":
                found["copy_batches"] = count
    return found


def _add_stalls(stalls: dict[str, dict[str, float]], name: str, result: Run) -> None:
    """Sum the distribution of stalls over repeats."""
    if result.is_off:
        return
    total = stalls.setdefault(name, {})
    for bound, count in histogram_increase(result.before, result.after, STALL).items():
        total[bound] = total.get(bound, 0.0) + count


def _describe(size: Size, repeats: int) -> dict[str, Any]:
    return {
        "workload": sources((SYNTHETIC,)),
        "requests_at_once": size.num_requests,
        "prompt_tokens": list(size.contexts),
        "output_tokens": size.num_output_tokens,
        "with_hog": list(size.hog_contexts),
        "with_synchronous": size.with_synchronous,
        "repeats": repeats,
        "half_kept": HALF_KEPT,
        "engine": make_engine(size).arguments("lazy"),
        "stock": "block size 32, the smallest that vLLM's CPU attention takes",
    }
