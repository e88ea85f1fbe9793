"""Thousands of short requests through one real engine, everything verified: ``scripts/soak``.

A two-layer model makes a step cost milliseconds, so that half an hour holds ten thousand requests
with random lengths, shared prefixes, aborts in every phase, live changes of the whole policy
document and a pool that is too small. Ends with a search for whatever was left behind.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.sharing import CacheAudit
from tests.engine.stress import Stress, StressOptions
from tests.engine.tiny_model import BYTES_PER_TOKEN, ENVIRONMENT, ensure_tiny_model
from vtoken.policies.registry import POLICIES

NUM_BLOCKS = 72
CONCURRENCY = 16
AUDIT_INTERVAL_STEPS = 10
PROGRESS_SECONDS = 15.0
MAX_GROWTH_MIB = 48
"""Of resident memory, from a quarter of the way to the end. A table or a row that every request
left behind would be more than that after 10⁴ of them; the allocator's noise is less."""

CHANGES: tuple[dict[str, Any], ...] = (
    *({"policy": name} for name in sorted(POLICIES)),
    {"policy": "random", "relocate_shared": True, "max_blocks_per_request": None},
    {"policy": "random", "relocate_shared": False, "max_blocks_per_request": None},
    {"relocate_into_cached": True},
    {"relocate_into_cached": False},
    {"budget_tokens": 24},
    {"budget_tokens": 48},
    {"keep_ratio": 0.3},
    {"mode": "naive"},
    {"mode": "lazy"},
    {"mode": "lazy", "theta_f": 0.05, "low_watermark_ratio": 1, "max_blocks_per_request": None},
    {"mode": "lazy", "theta_f": 0.4, "low_watermark_ratio": 0.3, "max_blocks_per_request": None},
    {"max_source_blocks": 2},
    {"max_source_blocks": 32},
    {"headroom_blocks": 0},
    {"headroom_blocks": 6},
    {"evict_interval_tokens": 1},
    {"evict_interval_tokens": 6},
    {"score_interval_steps": 1},
    {"score_interval_steps": 8},
    {"evict_during_prefill": True},
    {"evict_during_prefill": False},
    {"evict_free_ratio": 0.2},
    {"evict_free_ratio": 1.0},
    {"max_blocks_per_request": 3},
    {"max_blocks_per_request": None},
    {"check_interval_steps": 1},
    {"check_interval_steps": 5},
)


def make_soak_spec() -> dict[str, Any]:
    """The engine: 72 blocks for 16 requests of up to 200 tokens, everything verified."""
    return {
        "model": str(ensure_tiny_model()),
        "environment": ENVIRONMENT,
        "vtoken": {
            "mode": "lazy",
            "policy": "random",
            "budget_tokens": 40,
            "recent_tokens": 8,
            "evict_interval_tokens": 4,
            "theta_f": 0.1,
            "low_watermark_ratio": 0.8,
            "verify": "full",
        },
        "engine": {
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "max_model_len": 256,
            "max_num_batched_tokens": 192,
            "max_num_seqs": CONCURRENCY,
            "kv_cache_memory_bytes": NUM_BLOCKS * 16 * BYTES_PER_TOKEN,
            "skip_tokenizer_init": True,
        },
    }


class Soak:
    """One soak on an arm that was made from :func:`make_soak_spec`."""

    def __init__(
        self,
        arm: Any,
        num_requests: int,
        max_minutes: float,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        options = StressOptions(
            num_requests=num_requests,
            concurrency=CONCURRENCY + 6,
            seed=seed,
            changes=CHANGES,
            prompt_tokens=(1, 120),
            output_tokens=(1, 32),
            shared_tokens=48,
            num_families=3,
            max_seconds=60 * max_minutes,
            reset_ratio=0.02,
            tracks_owners=False,
        )
        self._arm = arm
        self._say = say
        self._wanted = num_requests
        self._stress = Stress(arm, options, self._after_step)
        self._audit = CacheAudit(arm)
        self._num_steps = 0
        self._start = self._said = time.monotonic()
        self._marks: list[tuple[int, float, int]] = []  # submitted, MiB, threads

    def run(self) -> dict[str, Any]:
        """Run to the end and count; see :func:`failures` for what must hold."""
        before = self._arm._counters()
        report = self._stress.run()
        self._arm._settle()
        seconds = time.monotonic() - self._start
        after = self._arm._counters()
        finished = report.pop("finished")
        return {
            **report,
            "finished": len(finished),
            "cut_short": sum(wanted != delivered for wanted, delivered in finished),
            "seconds": round(seconds, 1),
            "steps": self._num_steps,
            "requests_per_minute": round(60 * report["submitted"] / seconds),
            "cached_blocks_compared": self._audit.num_digests,
            "cached_blocks_changed": len(self._audit.changed),
            "left": self._left(),
            **self._growth(),
            "counters": {name: after[name] - before.get(name, 0) for name in after},
        }

    def _after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % AUDIT_INTERVAL_STEPS == 0:
            self._audit.check()
            self._marks.append((self._stress.submitted, resident_mib(), threading.active_count()))
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            self._say(self._progress(now - self._start))

    def _progress(self, seconds: float) -> str:
        stress, counters = self._stress, self._arm._counters()
        return (
            f"{seconds:6.0f} s  {stress.submitted:6d} requests"
            f"  {60 * stress.submitted / seconds:5.0f} a minute  {self._num_steps:6d} steps"
            f"  {counters['relocations_total/committed']:.0f} relocations"
            f"  {counters['preemptions_total']:.0f} preemptions"
            f"  {sum(stress.aborted.values())} aborts  {resident_mib():.0f} MiB"
        )

    def _left(self) -> dict[str, int]:
        """What is still held although every request is gone; all zero."""
        pool = self._arm.scheduler.kv_cache_manager.block_pool
        layer = self._arm.layer
        worker = self._arm.core.model_executor.driver_worker.worker
        # The worker hears of the last requests' end with the next step, which may never come.
        unheard = set(self._arm.scheduler.finished_req_ids)
        return {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "tables": len(layer.requests),
            "rows": len(worker.model_runner.core.rows._row_of.keys() - unheard),
            "plans": layer.reclamation.num_in_flight,
            "unproven": len(layer.reclamation._commits.unproven),
            "retained": layer.occupancy.retained_blocks,
            "live_tokens": layer.occupancy.live_tokens,
            "requests": len(self._arm.scheduler.requests),
        }

    def _growth(self) -> dict[str, Any]:
        quarter = next(m for m in self._marks if 4 * m[0] >= self._stress.submitted)
        last = self._marks[-1]
        return {
            "resident_mib": round(last[1]),
            "growth_mib": round(last[1] - quarter[1], 1),
            "growth_threads": last[2] - quarter[2],
        }


def failures(report: dict[str, Any]) -> list[str]:
    """What is wrong with a soak, one line each; empty if nothing is."""
    found = [f"{count} {what} left behind" for what, count in report["left"].items() if count]
    if report["cut_short"]:
        found.append(f"{report['cut_short']} requests ended early")
    unaccounted = report["submitted"] - report["finished"] - sum(report["aborted"].values())
    if unaccounted:
        found.append(f"{unaccounted} requests neither finished nor aborted")
    if report["cached_blocks_changed"]:
        found.append(f"{report['cached_blocks_changed']} cached blocks changed their bytes")
    if report["growth_threads"] > 0:
        found.append(f"{report['growth_threads']} more threads")
    if report["growth_mib"] > MAX_GROWTH_MIB:
        found.append(f"resident memory grew by {report['growth_mib']} MiB")
    for name, count in report["counters"].items():
        bad = name.startswith(("invariant_violations_total", "policy_errors_total"))
        if count and (bad or name == "relocations_total/failed"):
            found.append(f"{name} = {count:.0f}")
    return found


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="submit this many")
    parser.add_argument("--minutes", type=float, default=30.0, help="but for no longer than this")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    options = parser.parse_args(arguments)
    from tests.engine.arm import Arm, prepare_environment

    spec = make_soak_spec()
    prepare_environment(spec)
    arm = Arm(spec)
    say = functools.partial(print, flush=True)
    report = Soak(arm, options.requests, options.minutes, options.seed, say).run()
    print(json.dumps(report, indent=2))
    wrong = failures(report)
    print("\n".join(f"FAILED: {line}" for line in wrong) or "nothing is wrong", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
