"""Engine tests of the repository on vLLM for CUDA, as far as time is.

Those of Model Runner V2: on a CPU they run under Triton's interpreter, here through the worker that
serves on GPUs, which checks the device at every start.
"""

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
TESTS = "tests/engine/test_runner_v2.py"


def run_engine_tests(timeout_seconds: float) -> Iterator[Row]:
    """One row: what pytest says, or why it was not asked."""
    reason = why_not()
    if reason is not None:
        yield Row(SECTION, "engine tests", "left out", note=reason)
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "engine", TESTS]
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
        note = f"stopped after {timeout_seconds:.0f} s, nothing had failed; run pytest {TESTS}"
        yield Row(SECTION, "engine tests", "unfinished", note=note)
        return
    yield verdict(done.returncode, done.stdout)


def verdict(returncode: int, output: str) -> Row:
    """pytest's summary as a row; of a failure, also the first line that says why."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    summary = lines[-1].strip("= ") if lines else f"pytest ended with {returncode}"
    reasons = re.findall(r"^E +(.*(?:Error|vToken).*)$", output, re.MULTILINE)
    note = reasons[0][:200] if returncode and reasons else ""
    return Row(SECTION, "engine tests", summary, ok=returncode == 0, note=note)


def why_not() -> str | None:
    """The reason not to run them, if there is one."""
    for package in ("vllm", "pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"vLLM is built for {current_platform.device_type}, not for CUDA"
    return None
