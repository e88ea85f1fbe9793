"""Time of a decode step per mode against stock vLLM, in one run.

Run as ``scripts/bench_step_time [--rounds N] [--out FILE]``. Every arm is a process with its own
engine that holds the same batch in decode. The parent lets one arm at a time run a burst of
steps, in turn, so that drift of the machine hits all arms alike; figures are ratios to stock,
median over rounds with the middle half.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

NUM_REQUESTS = 8
STEPS_PER_BURST = 16
KEEP_HALF = {"keep_ratio": 0.5, "recent_tokens": 32}
ARMS: dict[str, dict[str, Any]] = {
    "stock": {"mode": "off"},
    "naive none": {"mode": "naive", "policy": "none"},
    "naive random 50 %": {"mode": "naive", "policy": "random", **KEEP_HALF},
    "lazy random 50 %": {
        "mode": "lazy",
        "policy": "random",
        "low_watermark_ratio": 1.0,
        **KEEP_HALF,
    },
}
"""``low_watermark_ratio`` 1: relocate although the pool is roomy, or there is nothing to time."""


def main() -> None:
    """Measure all arms at each context length and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1500])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {str(context): measure(context, args.rounds) for context in args.contexts}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(context: int, rounds: int) -> dict[str, Any]:
    """All arms at one context length, bursts in turn; the first round is discarded."""
    arms = {name: Arm(name, context, rounds) for name in ARMS}
    for arm in arms.values():
        arm.wait_ready()
    bursts: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for round_number in range(rounds + 1):
        order = list(arms) if round_number % 2 else list(arms)[::-1]
        for name in order:
            burst = arms[name].burst()
            if round_number:
                bursts[name].append(burst)
    extra = {name: arm.finish() for name, arm in arms.items()}
    return {
        name: {
            "step_milliseconds": _spread([b["step"] * 1e3 for b in bursts[name]]),
            "attention_milliseconds": _spread([b["attention"] * 1e3 for b in bursts[name]]),
            "step_ratio_to_stock": _ratios(bursts, name, "step"),
            "attention_ratio_to_stock": _ratios(bursts, name, "attention"),
            **extra[name],
        }
        for name in arms
    }


def _ratios(bursts: dict[str, list[dict[str, float]]], name: str, key: str) -> list[float]:
    pairs = zip(bursts[name], bursts["stock"], strict=True)
    return _spread([ours[key] / stock[key] for ours, stock in pairs])


def _spread(values: list[float]) -> list[float]:
    """``[quarter, median, three quarters]``."""
    return [round(float(x), 4) for x in np.quantile(values, [0.25, 0.5, 0.75])]


class Arm:
    """One engine in a process of its own, and the pipe to it."""

    def __init__(self, name: str, context: int, rounds: int) -> None:
        context_manager = mp.get_context("spawn")
        self._pipe, child = context_manager.Pipe()
        self._process = context_manager.Process(
            target=_serve, args=(child, ARMS[name], context, rounds)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until the batch is in decode."""
        assert self._pipe.recv() == "ready"

    def burst(self) -> dict[str, float]:
        """Seconds per step and per step's attention over one burst."""
        self._pipe.send("go")
        burst: dict[str, float] = self._pipe.recv()
        return burst

    def finish(self) -> dict[str, Any]:
        """End the process; what the token layer counted."""
        self._pipe.send("end")
        extra: dict[str, Any] = self._pipe.recv()
        self._process.join()
        return extra


def _serve(pipe: Connection, vtoken: dict[str, Any], context: int, rounds: int) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_PLUGINS="vtoken",
    )
    engine, spent = _start(vtoken, context, rounds)
    while engine.step() is not None and _prefilling(engine):
        pass
    pipe.send("ready")
    while pipe.recv() == "go":
        spent[0] = 0.0
        start = time.perf_counter()
        for _ in range(STEPS_PER_BURST):
            engine.step()
        seconds = (time.perf_counter() - start) / STEPS_PER_BURST
        pipe.send({"step": seconds, "attention": spent[0] / STEPS_PER_BURST})
    pipe.send(_extra(engine))


def _start(vtoken: dict[str, Any], context: int, rounds: int) -> tuple[Any, list[float]]:
    from vllm import LLM, SamplingParams

    from service.embedded_model import ensure_embedded_model
    from vtoken.config import VTokenConfig
    from vtoken.integration.vllm.plugin import engine_args

    config = VTokenConfig.from_dict(vtoken)
    kwargs = {
        "model": str(ensure_embedded_model()),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": NUM_REQUESTS,
        "block_size": 16,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
        "disable_log_stats": True,
        **engine_args(config),
    }
    if config.mode == "off":
        kwargs["block_size"] = 32  # stock's attention wants multiples of 32
    engine = LLM(**kwargs).llm_engine
    params = SamplingParams(
        temperature=0, max_tokens=(rounds + 3) * STEPS_PER_BURST, ignore_eos=True
    )
    rng = np.random.default_rng(0)
    for i in range(NUM_REQUESTS):
        ids = rng.integers(1000, 20000, context).tolist()
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    return engine, _time_attention(engine)


def _time_attention(engine: Any) -> list[float]:
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    spent = [0.0]
    for layer in layers:
        forward = layer.impl.forward

        def timed(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = _forward(*args, **kwargs)
            spent[0] += time.perf_counter() - start
            return result

        layer.impl.forward = timed
    return spent


def _prefilling(engine: Any) -> bool:
    scheduler = engine.engine_core.engine_core.scheduler
    requests = scheduler.requests.values()
    return any(r.num_computed_tokens < r.num_prompt_tokens for r in requests)


def _extra(engine: Any) -> dict[str, Any]:
    layer = getattr(engine.engine_core.engine_core.scheduler, "layer", None)
    if layer is None:
        return {}
    snapshot = layer.snapshot()["stats"]
    histograms = {
        name: h["sum"] / max(1, sum(h["counts"]))
        for name, h in snapshot["histograms"].items()
        if name.endswith("_seconds")
    }
    gauges = snapshot["gauges"]
    return {
        "mean_milliseconds": {k: round(v * 1e3, 4) for k, v in histograms.items()},
        "waste_ratio": round(gauges["waste_ratio"], 4),
        "retained_blocks": gauges["retained_blocks"],
        "ideal_blocks": gauges["ideal_blocks"],
        "committed": layer.stats.counter("relocations_total", "committed"),
    }


if __name__ == "__main__":
    main()
