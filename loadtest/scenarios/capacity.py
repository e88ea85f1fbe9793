"""What a run says about memory: the same numbers for every scenario and every mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from loadtest.bench import Run
from loadtest.fleet import BLOCK_SIZE
from loadtest.latency import Answer, summarize
from loadtest.probe import STEPS, Sample, mean_per_step

RECLAIM_EAGERLY = {"low_watermark_ratio": 1.0}
"""Relocate whenever F is above θ_F, although the pool is roomy: shows the mechanism, not the
default, which waits until half of the pool is taken."""


def full_house(samples: Sequence[Sample]) -> list[Sample]:
    """Samples in which at least nine tenths of the most ever decoding requests decode.

    That is the phase after the prefills and before the first requests end, in which arms differ
    in memory alone.
    """
    most = max((s.decoding or 0 for s in samples), default=0)
    return [s for s in samples if s.decoding and s.decoding >= 0.9 * most and not s.waiting]


def crowded(samples: Sequence[Sample]) -> list[Sample]:
    """Samples while requests wait, once the first wave has been admitted and cut."""
    waiting = [i for i, s in enumerate(samples) if s.waiting]
    if not waiting:
        return []
    first = next((i for i, s in enumerate(samples) if s.running), 0)
    begin = min(first + 2, len(samples) - 1)
    return list(samples[begin : waiting[-1] + 1])


def block_use(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over engine steps: blocks per running request, F and its companions."""
    usable = [s for s in samples if s.running and s.pool.get("retained_blocks")]
    if not usable:
        return {}

    def mean(value: Callable[[Sample], float]) -> float:
        return mean_per_step(usable, [value(s) for s in usable])

    return {
        "retained_blocks_per_request": mean(lambda s: s.pool["retained_blocks"] / s.running),
        "ideal_blocks_per_request": mean(lambda s: s.pool["ideal_blocks"] / s.running),
        "retained_over_ideal": mean(lambda s: s.pool["retained_blocks"] / s.pool["ideal_blocks"]),
        "waste_ratio": mean(lambda s: s.pool["waste_ratio"]),
        "utilization": mean(lambda s: 1 - s.pool["waste_ratio"]),
        "low_utilization_block_ratio": mean(lambda s: s.pool["low_utilization_block_ratio"]),
    }


def end_blocks(answers: Sequence[Answer], block_size: int = BLOCK_SIZE) -> dict[str, float]:
    """From the receipts, per request at its end: blocks held, blocks needed, tokens evicted.

    Exact, and independent of when anybody looked.
    """
    rows = []
    for answer in answers:
        receipt = answer.receipt
        if receipt.get("live_tokens") is None:
            continue
        computed = receipt["live_tokens"] + receipt["evicted_tokens"]
        held = math.ceil(computed / block_size) - receipt["freed_blocks"]
        ideal = math.ceil(receipt["live_tokens"] / block_size)
        rows.append((held, ideal, receipt["evicted_tokens"]))
    if not rows:
        return {}
    names = ("end_retained_blocks", "end_ideal_blocks", "end_evicted_tokens")
    return {
        name: sum(values) / len(rows)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def use_of_memory(run: Run, block_size: int = BLOCK_SIZE) -> dict[str, float]:
    """Blocks while all requests decode and at their end, and what the engine did for it."""
    return {
        **block_use(full_house(run.samples)),
        **end_blocks(run.answers, block_size),
        **work(run),
    }


def work(run: Run) -> dict[str, float]:
    """What the engine did for the whole load, in counts that depend on no clock."""
    steps = run.gained(STEPS)
    counts = {
        "steps": steps,
        "output_tokens_per_step": sum(a.num_output_tokens for a in run.answers) / max(1, steps),
        "preemptions": run.gained("vllm:num_preemptions_total"),
    }
    if run.is_off:
        return counts
    return counts | {
        "evicted_tokens": run.gained("vtoken_evicted_tokens_total"),
        "relocated_tokens": run.gained("vtoken_relocated_tokens_total"),
        "relocations": run.gained("vtoken_relocations_total", outcome="committed"),
        "freed_by_relocation": run.gained("vtoken_freed_blocks_total", how="relocation"),
    }


def speed(run: Run) -> dict[str, float]:
    """Client-side throughput and latencies; these depend on what else the machine does."""
    kept = (
        "output_throughput",
        "mean_ttft_ms",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "p99_tpot_ms",
        "mean_itl_ms",
        "p99_itl_ms",
        "mean_e2el_ms",
        "p95_e2el_ms",
        "p99_e2el_ms",
    )
    found = summarize(run.answers)
    return {name: found[name] for name in kept if name in found}
