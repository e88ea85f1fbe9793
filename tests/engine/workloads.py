"""Workloads that several engine tests share; equal dictionaries share one engine arm."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny_model import ENVIRONMENT, ensure_tiny_model

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


NOTHING_EVICTED = make_workload("none", 48, prompts=make_prompts((130, 250, 333, 411)))
"""What stock vLLM and engines with policy ``none`` are compared on."""


def in_mode(mode: str, workload: dict[str, Any]) -> dict[str, Any]:
    """The same after switching the engine to ``mode``, which comes before its name, too."""
    patch = {**workload.get("patch", {}), "mode": mode}
    return {**workload, "name": f"{mode} {workload['name']}", "patch": patch}


def on_tiny_model(**engine: Any) -> dict[str, Any]:
    """Of a spec: the engine of a test whose point is not what the model says.

    Its prompts are random tokens, and a step costs milliseconds.
    """
    return {
        "model": str(ensure_tiny_model()),
        "environment": ENVIRONMENT,
        "engine": {"skip_tokenizer_init": True, **engine},
    }


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """Victims, tokens and logprobs, with requests numbered: in one engine their names differ."""
    number = {request: i for i, request in enumerate(result["ids"])}
    victims = [[number[request], *rest] for request, *rest in result["evictions"]]
    return {"evictions": victims, "tokens": result["tokens"], "logprobs": result["logprobs"]}
