"""What observing attention costs: engine steps under a scoring policy against streaming_llm.

One real engine, eight requests of 750 live tokens each. The policy is switched while they run,
in turns of equal length, so that both see the same requests at the same sizes and share
whatever else the machine does. Compared are means per turn: observations happen in every
eighth step of a request, which a median would not see.

    python -m benchmarks.score_cost --rounds 10 --policies h2o,snapkv \\
        --out docs/evaluation/score_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from service.embedded_model import ensure_embedded_model
from vtoken.config import VTokenConfig

NUM_REQUESTS = 8
NUM_LIVE_TOKENS = 750
TURN_STEPS = 48
WARM_UP_STEPS = 16
"""Steps of a turn that are not counted: evictions wait for the first observations."""
BASELINE = "streaming_llm"


def start_engine(config: VTokenConfig) -> Any:
    """The embedded model with the engine inside this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
    os.environ.update(VLLM_PLUGINS="vtoken", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    from vllm import LLM

    from vtoken.integration.vllm.plugin import engine_args

    return LLM(
        model=str(ensure_embedded_model()),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
        **engine_args(config),
    ).llm_engine


def add_requests(engine: Any, num_steps: int) -> None:
    """Eight requests that decode for the whole measurement."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=num_steps + 64, ignore_eos=True, detokenize=False
    )
    for i in range(NUM_REQUESTS):
        prompt = {"prompt_token_ids": [(7 * i + 31 * j) % 40_000 + 100 for j in range(750)]}
        engine.add_request(str(i), prompt, params)


def run_turn(engine: Any, changes: Mapping[str, Any]) -> tuple[float, float]:
    """Mean seconds of a counted step under these settings: wall clock, CPU of this process."""
    core = engine.engine_core.engine_core
    answer = core.vtoken_call("set_policy", {"changes": changes})
    assert "ok" in answer, answer
    for step in range(TURN_STEPS):
        if step == WARM_UP_STEPS:
            start = time.perf_counter(), time.process_time()
        engine.step()
    num_steps = TURN_STEPS - WARM_UP_STEPS
    return (
        (time.perf_counter() - start[0]) / num_steps,
        (time.process_time() - start[1]) / num_steps,
    )


def summary(turns: Mapping[str, list[tuple[float, float]]], policy: str) -> dict[str, Any]:
    """Ratios of a policy's turns to the baseline's turns beside them."""
    found: dict[str, Any] = {"policy": policy}
    for kind, name in enumerate(("wall", "cpu")):
        own, base = ([turn[kind] for turn in turns[p]] for p in (policy, BASELINE))
        ratios = sorted(a / b for a, b in zip(own, base, strict=True))
        found[f"{name}_ratio_median"] = round(median(ratios), 4)
        found[f"{name}_ratio_range"] = [round(ratios[0], 4), round(ratios[-1], 4)]
        found[f"{name}_ratio_of_sums"] = round(sum(own) / sum(base), 4)
        found[f"{name}_step_ms"] = round(1e3 * median(own), 2)
    return found


def main() -> None:
    """Alternate the policies and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default="h2o")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--interval", type=int, default=8, help="score_interval_steps")
    args = parser.parse_args()
    policies = [BASELINE, *args.policies.split(",")]
    engine = start_engine(VTokenConfig(mode="lazy", budget_tokens=NUM_LIVE_TOKENS))
    add_requests(engine, args.rounds * len(policies) * TURN_STEPS)
    run_turn(engine, {"policy": BASELINE})
    turns: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for number in range(args.rounds):
        # Every other round backwards: a drift of the machine favours nobody.
        for policy in policies if number % 2 else policies[::-1]:
            changes = {"policy": policy, "score_interval_steps": args.interval}
            turns[policy].append(run_turn(engine, changes))
    result = {
        "num_requests": NUM_REQUESTS,
        "num_live_tokens": NUM_LIVE_TOKENS,
        "score_interval_steps": args.interval,
        "rounds": args.rounds,
        "policies": [summary(turns, policy) for policy in policies],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
