"""The scheduler's cost per step at scale: wraps ``scripts/bench_bookkeeping``, needs no service."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest.bench import Bench
from loadtest.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
PLOTS = ({"metric": "median_ms", "title": "Bookkeeping per step, ms of CPU", "x": "requests"},)
OPTIONS: dict[str, tuple[str, ...]] = {
    "full": ("--requests", "64", "128", "256", "512", "1024", "--tokens", "4096", "16384"),
    "quick": ("--requests", "64", "256", "--tokens", "4096"),
    "smoke": ("--quick",),
}
REPEATS = {"full": 3, "quick": 1, "smoke": 1}


async def run(bench: Bench) -> Outcome:
    """Run the benchmark once per repeat.

    Raises:
        RuntimeError: there is no benchmark here, or it failed.
        ValueError: something is to be changed (``--set``), and nothing can be.
    """
    if bench.overrides:
        raise ValueError("bookkeeping takes no --set: python -m benchmarks.bookkeeping has options")
    options = OPTIONS[bench.size]
    repeats = bench.repeats or REPEATS[bench.size]
    outcome = bench.begin(
        Outcome(config={"benchmark": ["benchmarks.bookkeeping", *options], "repeats": repeats})
    )
    for _ in range(repeats):
        for case in await _run_once(options):
            size = case["case"]
            name = f"{size['num_tokens']} tokens@{size['num_requests']}"
            times = case["milliseconds"]["total"]
            outcome.add(name, {f"{key}_ms": times[key] for key in ("median", "mean", "p99", "max")})
    outcome.not_measured.append("A model: this is the token layer's own work alone.")
    return outcome


async def _run_once(options: tuple[str, ...]) -> list[dict[str, Any]]:
    if not (ROOT / "benchmarks" / "bookkeeping.py").exists():
        raise RuntimeError("the bookkeeping benchmark comes with the repository only")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.bookkeeping", *options, "--out", str(out)]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait():
            raise RuntimeError(f"the bookkeeping benchmark ended with {process.returncode}")
        return list(json.loads(out.read_text()))
