"""What the online checks cost: ``verify`` off, sampled and full in turn, on one engine.

    python -m benchmarks.verify_cost [--rounds N] [--out FILE]

One engine holds a batch in decode and relocates all the time. The level changes from burst to
burst, so that drift of the machine hits all alike. Two figures per level: CPU time of a step as
ratio to the ``off`` bursts beside it, and the share of a step's CPU time that hashing takes, which
is exact even where the ratio drowns in noise.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

LEVELS = ("off", "sampled", "full")
NUM_REQUESTS = 8
NUM_PROMPT_TOKENS = 512
STEPS_PER_BURST = 32
VTOKEN: dict[str, Any] = {
    "mode": "lazy",
    "policy": "random",
    "keep_ratio": 0.5,
    "theta_f": 0.0,
    "low_watermark_ratio": 1.0,
}
"""Relocate in every step that has anything to gain: far more than in service, where most checks
end at θ_F or at the watermark."""


def main() -> None:
    """Measure and print, or write, the figures."""
    parser = argparse.ArgumentParser(description="CPU cost of the online checks per level.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_PLUGINS="vtoken",
        KMP_BLOCKTIME="0",  # idle OpenMP threads must not count as CPU time
    )
    text = json.dumps(measure(args.rounds), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(rounds: int) -> dict[str, Any]:
    """All levels in turn; the first round is discarded."""
    engine = _start(rounds)
    core = engine.engine_core.engine_core
    hashing = _time_hashing()
    bursts: dict[str, list[tuple[float, float]]] = {level: [] for level in LEVELS}
    for number in range(rounds + 1):
        for level in LEVELS if number % 2 else LEVELS[::-1]:
            assert "ok" in core.vtoken_call("set_policy", {"changes": {"verify": level}})
            hashing[0], start = 0.0, time.process_time()
            for _ in range(STEPS_PER_BURST):
                engine.step()
            seconds = time.process_time() - start
            if number:
                bursts[level].append((seconds, hashing[0]))
    return {
        "levels": {level: _figures(bursts[level], bursts["off"]) for level in LEVELS},
        "committed": core.scheduler.layer.stats.counter("relocations_total", "committed"),
        "steps": core.scheduler.num_steps,
    }


def _figures(bursts: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [ours[0] / other[0] for ours, other in zip(bursts, off, strict=True)]
    shares = [hashing / seconds for seconds, hashing in bursts]
    milliseconds = [seconds * 1e3 / STEPS_PER_BURST for seconds, _ in bursts]
    return {
        "step_cpu_milliseconds": round(float(np.median(milliseconds)), 2),
        "cpu_ratio_to_off": [round(float(x), 4) for x in np.quantile(ratios, [0.25, 0.5, 0.75])],
        "hashing_share_of_cpu": round(float(np.mean(shares)), 5),
    }


def _start(rounds: int) -> Any:
    from vllm import LLM, SamplingParams

    from service.embedded_model import ensure_embedded_model
    from vtoken.config import VTokenConfig
    from vtoken.integration.vllm.plugin import engine_args

    engine = LLM(
        model=str(ensure_embedded_model()),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=NUM_REQUESTS,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 29,
        seed=0,
        disable_log_stats=True,
        **engine_args(VTokenConfig.from_dict(VTOKEN)),
    ).llm_engine
    max_tokens = (rounds + 3) * len(LEVELS) * STEPS_PER_BURST
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(NUM_REQUESTS):
        ids = rng.integers(1000, 20000, NUM_PROMPT_TOKENS + 2 * i).tolist()
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    for _ in range(STEPS_PER_BURST):
        engine.step()
    return engine


def _time_hashing() -> list[float]:
    from vtoken.kv_pool import KVPool

    spent, digest = [0.0], KVPool.digest

    def timed(pool: KVPool, slots: Any) -> str:
        start = time.thread_time()
        result = digest(pool, slots)
        spent[0] += time.thread_time() - start
        return result

    KVPool.digest = timed  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    main()
