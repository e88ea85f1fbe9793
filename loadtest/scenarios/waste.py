"""How much of the blocks eviction leaves unused, without repacking (paper §2, Fig. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.bench import Bench, Load, abba
from loadtest.fleet import Arm, Engine
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import use_of_memory
from loadtest.scenarios.inputs import CONVERSATION, DOCUMENT, SYNTHETIC, make_jobs, sources
from loadtest.workloads import Lengths

PAPER = "56–67 % of blocks at most half full; F 40–60 % (H100, Llama-3.1-8B, 16K contexts)"
PLOTS = (
    {"metric": "low_utilization_block_ratio", "title": "Share of blocks at most half full, naive"},
    {"metric": "waste_ratio", "title": "Waste ratio F, naive"},
)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...]
    workloads: tuple[str, ...]
    lengths: Lengths
    repeats: int
    keep_ratio: float = 0.5


SIZES = {
    "full": Size(
        ("h2o", "scissorhands", "random", "snapkv", "streaming_llm", "paged_eviction"),
        (CONVERSATION, DOCUMENT),
        Lengths(8, 1024, 128),
        5,
    ),
    "quick": Size(("h2o", "random", "streaming_llm"), (DOCUMENT,), Lengths(8, 512, 64), 3),
    "smoke": Size(("random",), (SYNTHETIC,), Lengths(2, 96, 24), 1),
}


async def run(bench: Bench) -> Outcome:
    """Measure every policy on every workload in mode ``naive``."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(
        Outcome(
            config={
                "mode": "naive",
                "keep_ratio": size.keep_ratio,
                "workloads": sources(size.workloads),
                **size.lengths.described(),
                "repeats": repeats,
                "engine": Engine().arguments("naive"),
            },
            details={"paper": PAPER},
        )
    )
    for workload in size.workloads:
        arms = {
            f"{workload}/{policy}": Arm(
                f"{workload}/{policy}", "naive", {"policy": policy, "keep_ratio": size.keep_ratio}
            )
            for policy in size.policies
        }
        tokenizer = await bench.fleet.service(next(iter(arms.values())))
        for repeat, name in abba(list(arms), repeats):
            jobs = await make_jobs(workload, tokenizer, size.lengths, max(repeat, 0))
            result = await bench.run(arms[name], jobs if repeat >= 0 else jobs[:1], Load(), repeat)
            if repeat >= 0:
                outcome.add(name, use_of_memory(result))
    outcome.not_measured.append("Contexts of 16K tokens: the model takes 8K, a CPU is slow.")
    return outcome
