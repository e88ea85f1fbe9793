"""Blocks that a request holds, with the same evictions, without and with repacking (paper §4.1).

``naive`` and ``lazy`` get the same jobs and evict as many tokens of each; ``ideal`` is what the
live tokens would fill. Rival: ``paged_eviction``, which evicts whole pages and needs no repacking.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from loadtest.bench import Bench, Load, Run, abba
from loadtest.fleet import Arm, Engine
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import RECLAIM_EAGERLY, speed, use_of_memory
from loadtest.scenarios.inputs import CONVERSATION, DOCUMENT, SYNTHETIC, make_jobs, sources
from loadtest.scenarios.rivals import add_zipage
from loadtest.workloads import Lengths

METRICS = ("retained_blocks_per_request", "end_retained_blocks")
PAPER = "retained blocks per request −27.2 … −72.3 %, utilisation +21.7 points (H100, 7B and 8B)"
PLOTS = ({"metric": "end_retained_blocks", "title": "Blocks held at the end, per request"},)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...]
    workloads: tuple[str, ...]
    lengths: Lengths
    repeats: int
    keep_ratio: float = 0.5
    rivals: tuple[str, ...] = ("paged_eviction",)
    with_zipage: bool = False


SIZES = {
    "full": Size(
        ("h2o", "scissorhands", "random", "streaming_llm"),
        (CONVERSATION, DOCUMENT),
        Lengths(8, 1024, 128),
        5,
        with_zipage=True,
    ),
    "quick": Size(("h2o", "random"), (DOCUMENT,), Lengths(8, 512, 64), 3),
    "smoke": Size(("random",), (SYNTHETIC,), Lengths(2, 96, 24), 1, rivals=("paged_eviction",)),
}


def make_arms(size: Size, workload: str) -> dict[str, Arm]:
    """One arm per mode and policy, and the rivals."""
    common: dict[str, Any] = {"keep_ratio": size.keep_ratio, **RECLAIM_EAGERLY}
    arms = {}
    for mode, policies in (("naive", (*size.policies, *size.rivals)), ("lazy", size.policies)):
        for policy in policies:
            name = f"{workload}/{policy}/{mode}"
            arms[name] = Arm(name, mode, {"policy": policy, **common}, Engine())
    return arms


async def run(bench: Bench) -> Outcome:
    """Measure every arm on every workload."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(Outcome(config=describe(size, repeats)))
    outcome.details["paper"] = PAPER
    for workload in size.workloads:
        arms = make_arms(size, workload)
        tokenizer = await bench.fleet.service(next(iter(arms.values())))
        if size.with_zipage:
            await _add_zipage(bench, size, workload, arms)
        for repeat, name in abba(list(arms), repeats):
            jobs = await make_jobs(workload, tokenizer, size.lengths, max(repeat, 0))
            if repeat < 0:
                jobs = jobs[:2]
            result = await bench.run(arms[name], jobs, Load(), repeat)
            if repeat >= 0:
                outcome.add(name, measured(result))
        for policy in size.policies:
            lazy, naive = (f"{workload}/{policy}/{mode}" for mode in ("lazy", "naive"))
            outcome.compare(lazy, naive, METRICS)
            for rival in size.rivals:
                outcome.compare(lazy, f"{workload}/{rival}/naive", METRICS)
    outcome.not_measured.append("Models above 135M parameters, contexts above 2048 tokens, CUDA.")
    return outcome


async def _add_zipage(bench: Bench, size: Size, workload: str, arms: dict[str, Arm]) -> None:
    """A cap at what the longest prompt may keep, with the first policy."""
    budget = int(size.keep_ratio * size.lengths.num_prompt_tokens)
    first = f"{workload}/{size.policies[0]}/lazy"
    found = dict(arms)
    await add_zipage(bench, found, first, budget)
    if "zipage" in found:
        arms[f"{workload}/zipage"] = replace(found["zipage"], name=f"{workload}/zipage")


def measured(result: Run) -> dict[str, float]:
    """All metrics of one run."""
    return use_of_memory(result) | speed(result)


def describe(size: Size, repeats: int) -> dict[str, Any]:
    """What was sent to what."""
    return {
        "policies": list(size.policies),
        "rivals": list(size.rivals),
        "keep_ratio": size.keep_ratio,
        "workloads": sources(size.workloads),
        **size.lengths.described(),
        "repeats": repeats,
        "engine": Engine().arguments("lazy"),
        "policy_document": {"theta_f": 0.25, **RECLAIM_EAGERLY},
    }
