"""One setting at a time around the defaults (paper §4.5), over wider ranges.

Block size, keep ratio, θ_F from 0.05 to 0.90, the most source blocks of a plan (B), and the tokens
between two evictions; mode ``lazy``. Each value is compared with the default of its setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loadtest.bench import Bench, Load, abba
from loadtest.fleet import Arm, Engine
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import RECLAIM_EAGERLY, speed, use_of_memory
from loadtest.scenarios.inputs import DOCUMENT, SYNTHETIC, make_jobs, sources
from loadtest.workloads import Lengths

POOL_TOKENS = 19_200
DEFAULTS = {
    "theta_f": 0.25,
    "keep_ratio": 0.5,
    "max_source_blocks": 32,
    "evict_interval_tokens": 16,
    "block_size": 16,
}
COMPARED = ("end_retained_blocks", "relocated_tokens", "output_throughput", "p95_e2el_ms")
PAPER = "block size 16 is best; keep ratio acts strongly; θ_F 0.20 … 0.35 hardly at all"
PLOTS = (
    {"metric": "waste_ratio", "title": "Waste ratio F, lazy", "x": "setting"},
    {"metric": "relocated_tokens", "title": "Tokens copied for the load", "x": "setting"},
)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    settings: dict[str, tuple[float, ...]]
    lengths: Lengths
    repeats: int
    policy: str = "random"
    workload: str = DOCUMENT


SIZES = {
    "full": Size(
        {
            "theta_f": (0.05, 0.1, 0.2, 0.25, 0.35, 0.5, 0.7, 0.9),
            "keep_ratio": (0.3, 0.4, 0.5, 0.6, 0.7),
            "max_source_blocks": (2, 4, 8, 16, 32, 64),
            "evict_interval_tokens": (1, 4, 16, 32, 64),
            "block_size": (16, 32, 48, 64),
        },
        Lengths(8, 768, 128),
        5,
    ),
    "quick": Size({"theta_f": (0.05, 0.25, 0.9)}, Lengths(8, 512, 64), 2),
    "smoke": Size({"theta_f": (0.05, 0.9)}, Lengths(2, 96, 24), 1, workload=SYNTHETIC),
}


def make_arm(size: Size, setting: str, value: float) -> Arm:
    """The defaults but for one setting."""
    settings: dict[str, Any] = {**DEFAULTS, setting: type(DEFAULTS[setting])(value)}
    block_size = settings.pop("block_size")
    policy = {"policy": size.policy, **settings, **RECLAIM_EAGERLY}
    engine = Engine(POOL_TOKENS // block_size, block_size)
    return Arm(f"{setting}@{value:g}", "lazy", policy, engine)


async def run(bench: Bench) -> Outcome:
    """Measure every value of every setting."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(
        Outcome(
            config={
                "mode": "lazy",
                "policy": size.policy,
                "defaults": {**DEFAULTS, **RECLAIM_EAGERLY},
                "settings": {name: list(values) for name, values in size.settings.items()},
                "workload": sources((size.workload,)),
                **size.lengths.described(),
                "repeats": repeats,
                "engine": Engine().arguments("lazy"),
            },
            details={"paper": PAPER},
        )
    )
    for setting, values in size.settings.items():
        arms = {arm.name: arm for arm in (make_arm(size, setting, value) for value in values)}
        for repeat, name in abba(list(arms), repeats):
            tokenizer = await bench.fleet.service(arms[name])
            jobs = await make_jobs(size.workload, tokenizer, size.lengths, max(repeat, 0))
            result = await bench.run(arms[name], jobs if repeat >= 0 else jobs[:1], Load(), repeat)
            if repeat >= 0:
                block_size = arms[name].engine.block_size
                outcome.add(name, use_of_memory(result, block_size) | speed(result))
        default = make_arm(size, setting, DEFAULTS[setting]).name
        for name in arms:
            if name != default:
                outcome.compare(name, default, COMPARED)
    outcome.not_measured.append("Two settings at a time; block sizes below 16.")
    return outcome
