"""The engine tests of the repository on vLLM for CUDA, as far as that is supported and time is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.report import Row

SECTION = "engine"
ROOT = Path(__file__).parents[2]
REFUSAL = "only the CPU engine is supported so far"
"""As :mod:`vtoken.integration.vllm.support` words it."""


def run_engine_tests(timeout_seconds: float) -> Iterator[Row]:
    """One row: what pytest says, or why it was not asked."""
    reason = why_not()
    if reason is not None:
        yield Row(SECTION, "engine tests", "left out", note=reason)
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "engine", "tests/engine"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        note = f"stopped after {timeout_seconds:.0f} s, nothing had failed; run pytest -m engine"
        yield Row(SECTION, "engine tests", "unfinished", note=note)
        return
    yield verdict(done.returncode, done.stdout)


def verdict(returncode: int, output: str) -> Row:
    """pytest's summary as a row; that this version refuses GPUs is no failure of the GPU."""
    if REFUSAL in output:
        return Row(SECTION, "engine tests", "left out", note=f"refused at start: {REFUSAL}")
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    summary = lines[-1].strip("= ") if lines else f"pytest ended with {returncode}"
    return Row(SECTION, "engine tests", summary, ok=returncode == 0)


def why_not() -> str | None:
    """The reason not to run them, if there is one."""
    for package in ("vllm", "pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"vLLM is built for {current_platform.device_type}, not for CUDA"
    return None
