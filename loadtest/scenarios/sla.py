"""Highest throughput within a latency limit (paper §4.2).

The limit is 1.05 times the p95 latency of ``naive`` with 8 clients. Both modes sweep the number of
clients of a closed loop on a pool that is too small for all of them. In an open loop, requests
arrive at random (Poisson) whatever became of the others, and those within the limit are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.bench import Bench, Load
from loadtest.fleet import Arm, Engine
from loadtest.latency import Goals, summarize
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import work
from loadtest.scenarios.inputs import DOCUMENT, SYNTHETIC, make_jobs, sources
from loadtest.search import Point, best_within, sweep
from loadtest.workloads import Lengths, poisson_offsets

SLACK = 1.05
PAPER = "+9.9 … +37.3 % (Mistral-7B), +18.9 % in the mean (Llama-3.1-8B); abstract: up to 1.37×"
PLOTS = (
    {"metric": "output_throughput", "title": "Throughput, tokens/s", "x": "clients"},
    {"metric": "p95_e2el_ms", "title": "p95 latency, ms", "x": "clients"},
)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...]
    lengths: Lengths
    concurrencies: tuple[int, ...]
    reference: int
    repeats: int
    workload: str
    num_blocks: int
    rates: tuple[float, ...] = ()


SIZES = {
    "full": Size(
        ("random", "h2o"),
        Lengths(32, 600, 160),
        (2, 4, 6, 8, 10, 12, 16),
        8,
        5,
        DOCUMENT,
        240,
        rates=(0.25, 0.5, 0.75, 1.0),
    ),
    "quick": Size(("random",), Lengths(16, 512, 64), (4, 5, 6, 8, 10, 12), 8, 1, DOCUMENT, 200),
    "smoke": Size(("random",), Lengths(4, 96, 24), (1, 2), 2, 1, SYNTHETIC, 1200, rates=(8.0,)),
}
BUDGET_TOKENS = {"full": 256, "quick": 192, "smoke": 48}


def make_arms(size: Size, policy: str, budget: int) -> dict[str, Arm]:
    """``naive`` and ``lazy`` with one policy."""
    document = {"policy": policy, "budget_tokens": budget}
    if budget < 64:
        document |= {"recent_tokens": 16}
    engine = Engine(num_blocks=size.num_blocks)
    return {mode: Arm(f"{policy}/{mode}", mode, {**document}, engine) for mode in ("naive", "lazy")}


async def run(bench: Bench) -> Outcome:
    """Sweep both modes, once per repeat, with the repeat's own limit."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(Outcome(config=_describe(size, repeats, BUDGET_TOKENS[bench.size])))
    outcome.details |= {"paper": PAPER, "limits_ms": {}}
    for policy in size.policies:
        arms = make_arms(size, policy, BUDGET_TOKENS[bench.size])
        search = _Search(bench, size, outcome)
        for arm in arms.values():
            await search.measure(arm, min(size.concurrencies), -1)
        for repeat in range(repeats):
            reference = await search.measure(arms["naive"], size.reference, repeat)
            limit = SLACK * reference.latency_ms
            outcome.details["limits_ms"].setdefault(policy, []).append(round(limit, 1))
            order = ("naive", "lazy") if repeat % 2 == 0 else ("lazy", "naive")
            for mode in order:
                known = {size.reference: reference} if mode == "naive" else {}
                await search.select(arms[mode], repeat, limit, known)
                for rate in size.rates:
                    await search.arrive(arms[mode], repeat, limit, rate)
        metrics = ("selected_throughput", "selected_p95_e2el_ms")
        outcome.compare(f"{policy}/lazy", f"{policy}/naive", metrics)
        for rate in size.rates:
            lazy, naive = (f"{policy}/{mode} open@{rate:g}" for mode in ("lazy", "naive"))
            outcome.compare(lazy, naive, ("request_goodput", "p95_e2el_ms"))
    outcome.not_measured.append("Limits on TTFT or TPOT alone; arrivals in bursts.")
    return outcome


class _Search:
    def __init__(self, bench: Bench, size: Size, outcome: Outcome) -> None:
        self._bench, self._size, self._outcome = bench, size, outcome

    async def select(
        self, arm: Arm, repeat: int, limit_ms: float, known: Mapping[int, Point]
    ) -> None:
        """Sweep one arm, but for known points, and note the selected one."""

        async def measure(concurrency: int) -> Point:
            return known.get(concurrency) or await self.measure(arm, concurrency, repeat)

        points = await sweep(measure, self._size.concurrencies, limit_ms)
        best = best_within(points, limit_ms)
        if best is not None:
            self._outcome.add(
                arm.name,
                {
                    "selected_throughput": best.throughput,
                    "selected_p95_e2el_ms": best.latency_ms,
                    "selected_concurrency": best.concurrency,
                },
            )

    async def arrive(self, arm: Arm, repeat: int, limit_ms: float, rate: float) -> None:
        """One open loop of ``rate`` requests per second; goodput counts those within the limit."""
        tokenizer = await self._bench.fleet.service(arm)
        lengths = self._size.lengths
        jobs = await make_jobs(self._size.workload, tokenizer, lengths, repeat)
        offsets = poisson_offsets(len(jobs), rate, repeat)
        load = Load(offsets=tuple(offsets))
        result = await self._bench.run(arm, jobs, load, repeat, watch=False)
        found = summarize(result.answers, Goals(e2el_ms=limit_ms))
        names = ("request_goodput", "request_throughput", "p95_e2el_ms", "p99_ttft_ms")
        metrics = {name: found[name] for name in names}
        self._outcome.add(f"{arm.name} open@{rate:g}", {**metrics, **work(result)})

    async def measure(self, arm: Arm, concurrency: int, repeat: int) -> Point:
        """One closed loop; at least twice as many requests as clients. Repeat −1 is discarded."""
        lengths = self._size.lengths
        num_jobs = max(lengths.num_jobs, 2 * concurrency) if repeat >= 0 else concurrency
        lengths = Lengths(num_jobs, lengths.num_prompt_tokens, lengths.num_output_tokens)
        tokenizer = await self._bench.fleet.service(arm)
        jobs = await make_jobs(self._size.workload, tokenizer, lengths, max(repeat, 0))
        load = Load(concurrency)
        result = await self._bench.run(arm, jobs, load, repeat, watch=False)
        found = summarize(result.answers)
        if repeat >= 0:
            names = ("output_throughput", "p95_e2el_ms", "mean_tpot_ms", "mean_ttft_ms")
            metrics = {name: found[name] for name in names}
            self._outcome.add(f"{arm.name}@{concurrency}", {**metrics, **work(result)})
        return Point(concurrency, found["output_throughput"], found["p95_e2el_ms"])


def _describe(size: Size, repeats: int, budget: int) -> dict[str, Any]:
    return {
        "policies": list(size.policies),
        "budget_tokens": budget,
        "workload": sources((size.workload,)),
        "prompt_tokens": size.lengths.num_prompt_tokens,
        "output_tokens": size.lengths.num_output_tokens,
        "clients": list(size.concurrencies),
        "open_loop_requests_per_second": list(size.rates),
        "limit": f"{SLACK} × p95 of naive with {size.reference} clients, measured in each repeat",
        "repeats": repeats,
        "engine": Engine(num_blocks=size.num_blocks).arguments("lazy"),
    }
