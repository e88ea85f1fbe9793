"""How many requests fit into a fixed number of blocks (paper §4.3).

Two views. *Saturated*: more requests than can run are sent at once, and those that run are counted
while others wait. *Sweep*: the number of clients of a closed loop rises until the pool no longer
keeps up: a preemption, or on average more than a tenth of the open requests waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench import Bench, Load, Run, abba
from loadtest.fleet import BLOCK_SIZE, STOCK_BLOCK_SIZE, Arm, Engine
from loadtest.outcome import Outcome
from loadtest.probe import Sample, mean_per_step
from loadtest.scenarios.capacity import block_use, crowded, speed, work
from loadtest.scenarios.inputs import DOCUMENT, SYNTHETIC, make_jobs, sources
from loadtest.scenarios.rivals import FP8, FP8_BYTES_RATIO, add_zipage, make_fp8_arm
from loadtest.search import highest_feasible
from loadtest.workloads import Lengths

MAX_WAITING_RATIO = 0.1
SWEEP = ", sweep"
METRICS = {
    "": (
        "running",
        "peak_running",
        "steps",
        "output_tokens_per_step",
        "output_throughput",
        "blocks_per_running_request",
    ),
    SWEEP: ("highest_feasible",),
}
"""What is compared in each view; a sweep is an arm of its own, for it has repeats of its own."""
PAPER = "native and naive up to 5, vToken up to 8 requests (5 427 blocks); 11 → 22 (11 519 blocks)"
PLOTS = (
    {"metric": "running", "title": "Requests running while others wait", "x": "blocks in the pool"},
    {"metric": "output_tokens_per_step", "title": "Output tokens per step", "x": "blocks"},
    {"metric": "highest_feasible", "title": "Highest feasible number of clients", "x": "blocks"},
)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...]
    pools: tuple[int, ...]
    saturated: Lengths
    budget_tokens: int
    concurrencies: tuple[int, ...]
    repeats: int
    sweep_repeats: int
    sweep_pools: tuple[int, ...]
    workload: str = DOCUMENT
    rivals: tuple[str, ...] = ("fp8", "paged_eviction", "zipage")
    max_model_len: int = 1024
    zipage_buffer_tokens: int = BLOCK_SIZE


SIZES = {
    "full": Size(
        policies=("random", "h2o"),
        pools=(1250, 425, 300, 200),
        saturated=Lengths(28, 600, 160),
        budget_tokens=256,
        concurrencies=(3, 4, 5, 6, 8, 9, 10, 12, 14, 16, 18, 20, 22),
        repeats=5,
        sweep_repeats=3,
        sweep_pools=(200, 425),
    ),
    "quick": Size(
        policies=("random",),
        pools=(200,),
        saturated=Lengths(12, 600, 64),
        budget_tokens=256,
        concurrencies=(3, 4, 6, 8, 10),
        repeats=3,
        sweep_repeats=1,
        sweep_pools=(),
        rivals=("paged_eviction",),
    ),
    "smoke": Size(
        policies=("random",),
        pools=(1200,),
        saturated=Lengths(3, 96, 24),
        budget_tokens=64,
        concurrencies=(2,),
        repeats=1,
        sweep_repeats=1,
        sweep_pools=(1200,),
        workload=SYNTHETIC,
        rivals=(),
        max_model_len=2048,
    ),
}


def make_engine(size: Size, num_blocks: int) -> Engine:
    """A pool of so many blocks."""
    return Engine(num_blocks=num_blocks, flags={"max-model-len": str(size.max_model_len)})


async def make_arms(bench: Bench, size: Size, num_blocks: int) -> dict[str, Arm]:
    """Native, naive and lazy per policy, and the rivals, on a pool of the same bytes."""
    engine = make_engine(size, num_blocks)
    arms = {"native": Arm("native", "off", {}, engine)}
    if "fp8" in size.rivals and (arm := await make_fp8_arm(bench, engine)):
        arms[FP8] = arm
    for policy in size.policies:
        document = {"policy": policy, "budget_tokens": size.budget_tokens}
        for mode in ("naive", "lazy"):
            arms[f"{policy}/{mode}"] = Arm(f"{policy}/{mode}", mode, document, engine)
    if "paged_eviction" in size.rivals:
        document = {"policy": "paged_eviction", "budget_tokens": size.budget_tokens}
        arms["paged_eviction"] = Arm("paged_eviction", "naive", document, engine)
    if "zipage" in size.rivals:
        like = f"{size.policies[0]}/lazy"
        await add_zipage(bench, arms, like, size.budget_tokens, size.zipage_buffer_tokens)
    return arms


async def run(bench: Bench) -> Outcome:
    """Measure both views on every pool, from ample to tight."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(Outcome(config=_describe(size, repeats), details={"paper": PAPER}))
    for num_blocks in size.pools:
        arms = await make_arms(bench, size, num_blocks)
        await _saturate(bench, size, outcome, arms, num_blocks, repeats)
        if num_blocks in size.sweep_pools:
            await _sweep_all(bench, size, outcome, arms, num_blocks)
        for policy in size.policies:
            ours = f"{policy}/lazy"
            for theirs in (f"{policy}/naive", "native", FP8, "paged_eviction", "zipage"):
                for view, metrics in METRICS.items():
                    suffix = f"{view}@{num_blocks}"
                    outcome.compare(ours + suffix, theirs + suffix, metrics)
        await bench.fleet.release()
    outcome.not_measured.append("Outputs of thousands of tokens, as in the paper.")
    return outcome


async def _saturate(
    bench: Bench, size: Size, outcome: Outcome, arms: dict[str, Arm], blocks: int, repeats: int
) -> None:
    for repeat, name in abba(list(arms), repeats):
        tokenizer = await bench.fleet.service(arms[name])
        jobs = await make_jobs(size.workload, tokenizer, size.saturated, max(repeat, 0))
        result = await bench.run(arms[name], jobs if repeat >= 0 else jobs[:1], Load(), repeat)
        if repeat >= 0:
            found = saturated(result, FP8_BYTES_RATIO if name == FP8 else 1.0)
            outcome.add(f"{name}@{blocks}", {**found, **work(result), **speed(result)})


def saturated(result: Run, bytes_ratio: float = 1.0) -> dict[str, float]:
    """How many run at once while others wait (if any ever do), and in how many blocks each.

    Blocks have the bytes of 16 tokens of the model's type; ``bytes_ratio`` is what a token of this
    cache takes of that. The peak is over the whole run, as R-KV's stress test reports it.
    """
    crowd = [s for s in crowded(result.samples) if s.running]
    samples = crowd or [s for s in result.samples if s.running]
    size = STOCK_BLOCK_SIZE if result.is_off else BLOCK_SIZE
    scale = bytes_ratio * size / BLOCK_SIZE
    blocks = [s.pool["used_blocks"] * scale / s.running for s in samples]
    running = {"running": mean_per_step(crowd, [s.running for s in crowd])} if crowd else {}
    return {
        **running,
        "peak_running": max((s.running for s in result.samples), default=0),
        "blocks_per_running_request": mean_per_step(samples, blocks),
        **block_use(samples),
    }


async def _sweep_all(
    bench: Bench, size: Size, outcome: Outcome, arms: dict[str, Arm], blocks: int
) -> None:
    for repeat in range(size.sweep_repeats):
        for name, arm in arms.items():
            tried = []
            for concurrency in size.concurrencies:
                lengths = Lengths(
                    2 * concurrency,
                    size.saturated.num_prompt_tokens,
                    size.saturated.num_output_tokens,
                )
                tokenizer = await bench.fleet.service(arm)
                jobs = await make_jobs(size.workload, tokenizer, lengths, 100 + repeat)
                result = await bench.run(arm, jobs, Load(concurrency), repeat)
                tried.append((concurrency, is_feasible(result, concurrency)))
                if not tried[-1][1]:
                    break
            highest = highest_feasible(tried)
            outcome.add(f"{name}{SWEEP}@{blocks}", {"highest_feasible": highest})


def is_feasible(result: Run, concurrency: int) -> bool:
    """No preemption, and hardly anybody waits while all clients have a request open."""
    if work(result)["preemptions"]:
        return False
    return waiting_ratio(result.samples, concurrency) <= MAX_WAITING_RATIO


def waiting_ratio(samples: Sequence[Sample], concurrency: int) -> float:
    """Share of the open requests that wait, mean over steps in which all clients have one.

    If no sample shows that, over all steps in which anybody has one.
    """
    open_ones = [s for s in samples if s.running + s.waiting]
    full = [s for s in open_ones if s.running + s.waiting >= concurrency] or open_ones
    return mean_per_step(full, [s.waiting / (s.running + s.waiting) for s in full])


def _describe(size: Size, repeats: int) -> dict[str, Any]:
    return {
        "policies": list(size.policies),
        "budget_tokens": size.budget_tokens,
        "zipage_buffer_tokens": size.zipage_buffer_tokens if "zipage" in size.rivals else None,
        "workload": sources((size.workload,)),
        "requests": size.saturated.num_jobs,
        "prompt_tokens": size.saturated.num_prompt_tokens,
        "output_tokens": size.saturated.num_output_tokens,
        "pools_in_blocks_of_16": list(size.pools),
        "clients": list(size.concurrencies),
        "feasible": f"no preemption, and at most {MAX_WAITING_RATIO:.0%} of open requests wait",
        "repeats": repeats,
        "sweep_repeats": size.sweep_repeats,
        "engine": make_engine(size, size.pools[-1]).arguments("lazy"),
        "native": f"block size {STOCK_BLOCK_SIZE}, half as many blocks: the same bytes",
    }
