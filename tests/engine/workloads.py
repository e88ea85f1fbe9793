"""Workloads that several engine tests share; equal dictionaries share one engine arm."""

from __future__ import annotations

from typing import Any

PROMPT_LENGTHS = (130, 250, 333, 411, 480, 555, 610, 700)
"""Eight concurrent requests of different lengths."""

EVICTING = {
    "budget_tokens": 160,
    "evict_interval_tokens": 16,
    "recent_tokens": 16,
    "theta_f": 0.0,
    "low_watermark_ratio": 1.0,
    "record_evictions": True,
}
"""Eager to relocate even in a roomy pool, so that every step may move something."""


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, step: int = 97) -> list[list[int]]:
    """``[start, length]`` into the token stream of the test text."""
    return [[i * step, n] for i, n in enumerate(lengths)]


def make_workload(policy: str, max_tokens: int, **overrides: Any) -> dict[str, Any]:
    """Generate greedily with a policy, after switching the engine to it."""
    return {
        "name": policy,
        "patch": {"policy": policy},
        "prompts": make_prompts(),
        "max_tokens": max_tokens,
        "logprobs": 5,
        **overrides,
    }
