"""Requests that share a prefix through vLLM's prefix cache (paper §4.6).

Groups of 1, 2, 4 or 8 requests have the first part of their prompts in common. A shared block is
held once and never repacked, unless ``relocate_shared`` is on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from loadtest.bench import Bench, Load, Run, abba
from loadtest.client import Client
from loadtest.fleet import Arm, Engine
from loadtest.outcome import Outcome
from loadtest.probe import mean_per_step
from loadtest.scenarios.capacity import RECLAIM_EAGERLY, end_blocks, full_house, work
from loadtest.scenarios.inputs import SYNTHETIC, make_jobs, sources
from loadtest.workloads import Job, Lengths

PAPER = "−28.6 … −42.2 % retained blocks at sharing degrees 2, 4, 8; same hit rate"
PLOTS = (
    {"metric": "used_blocks", "title": "Blocks in use while all decode", "x": "sharing degree"},
)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": ("naive", {}),
    "lazy": ("lazy", {}),
    "lazy, shared too": ("lazy", {"relocate_shared": True}),
}


ENGINE = Engine(flags={"enable-prefix-caching": True})
SMOKE_ENGINE = Engine(flags={"enable-prefix-caching": True, "max-num-batched-tokens": "256"})
"""Shared with the quality scenario in smoke runs."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    degrees: tuple[int, ...]
    num_requests: int
    num_shared_tokens: int
    num_own_tokens: int
    num_output_tokens: int
    repeats: int
    keep_ratio: float = 0.5
    engine: Engine = ENGINE


SIZES = {
    "full": Size((1, 2, 4, 8), 8, 512, 512, 96, 5),
    "quick": Size((1, 4), 8, 256, 256, 48, 2),
    "smoke": Size((2,), 2, 64, 32, 24, 1, engine=SMOKE_ENGINE),
}


async def run(bench: Bench) -> Outcome:
    """Measure every arm at every degree of sharing."""
    size = bench.sized(SIZES)
    repeats = bench.repeats or size.repeats
    outcome = bench.begin(Outcome(config=_describe(size, repeats), details={"paper": PAPER}))
    document = {"policy": "random", "keep_ratio": size.keep_ratio, **RECLAIM_EAGERLY}
    document["relocate_into_cached"] = True  # what earlier repeats left is nobody's any more
    arms = {
        name: Arm(name, mode, {**document, "theta_f": 0.0, **own}, size.engine)
        for name, (mode, own) in ARMS.items()
    }
    for degree in size.degrees:
        for repeat, name in abba(list(arms), repeats):
            tokenizer = await bench.fleet.service(arms[name])
            salt = f"{name} {degree} {repeat}"
            leaders, jobs = await make_groups(tokenizer, size, degree, max(repeat, 0), salt)
            if repeat < 0:
                jobs = jobs[:1]
            await bench.run(arms[name], leaders, Load(), repeat)  # fills the prefix cache
            result = await bench.run(arms[name], jobs, Load(), repeat)
            if repeat >= 0:
                outcome.add(f"{name}@{degree}", measured(result))
        for name in ("lazy", "lazy, shared too"):
            outcome.compare(f"{name}@{degree}", f"naive@{degree}", ("used_blocks",))
    outcome.not_measured.append(
        "Prefixes of 8K tokens, as in the paper: the model takes 8K in all."
    )
    return outcome


async def make_groups(
    tokenizer: Client, size: Size, degree: int, seed: int, salt: str
) -> tuple[list[Job], list[Job]]:
    """Jobs that compute the prefixes, and the jobs themselves, group by group.

    Args:
        tokenizer: of the service.
        size: lengths.
        degree: requests per prefix.
        seed: of the texts.
        salt: keeps what other runs cached out of this one.
    """
    num_groups = max(1, size.num_requests // degree)
    prefix_lengths = Lengths(num_groups, size.num_shared_tokens, 1)
    own_lengths = Lengths(size.num_requests, size.num_own_tokens, size.num_output_tokens)
    prefixes = await make_jobs(SYNTHETIC, tokenizer, prefix_lengths, 2 * seed)
    own = await make_jobs(SYNTHETIC, tokenizer, own_lengths, 2 * seed + 1)
    extra = {"cache_salt": salt}
    jobs = [
        replace(job, prompt=prefixes[i // degree % num_groups].prompt + job.prompt, extra=extra)
        for i, job in enumerate(own)
    ]
    return [replace(prefix, extra=extra) for prefix in prefixes], jobs


def measured(result: Run) -> dict[str, float]:
    """Blocks in use (a shared one counts once) while all decode, and the share of cached tokens."""
    samples = full_house(result.samples)
    queries = result.gained("vllm:prefix_cache_queries_total")
    hits = result.gained("vllm:prefix_cache_hits_total")
    return {
        "used_blocks": mean_per_step(samples, [s.pool["used_blocks"] for s in samples]),
        "prefix_hit_ratio": hits / queries if queries else 0.0,
        "shared_relocations": result.gained("vtoken_shared_relocations_total"),
        **end_blocks(result.answers),
        **work(result),
    }


def _describe(size: Size, repeats: int) -> dict[str, Any]:
    return {
        "policy": "random",
        "keep_ratio": size.keep_ratio,
        "theta_f": 0.0,
        "relocate_into_cached": True,
        "workload": sources((SYNTHETIC,)),
        "requests_at_once": size.num_requests,
        "shared_prompt_tokens": size.num_shared_tokens,
        "own_prompt_tokens": size.num_own_tokens,
        "output_tokens": size.num_output_tokens,
        "repeats": repeats,
        "engine": size.engine.arguments("lazy"),
    }
