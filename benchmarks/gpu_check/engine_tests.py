"""Engine tests of the repository on vLLM for CUDA, as far as time is, with both model runners.

On a CPU they run through the CPU's worker, those of Model Runner V2 under Triton's interpreter;
here through the worker that serves on GPUs, which checks the device at every start. Which runner
engines get says :data:`SWITCH`, for all tests of a file at once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.report import Row

SECTION = "engine"
ROOT = Path(__file__).parents[2]
SWITCH = "VTOKEN_TEST_RUNNER"
RUNNERS = ("v2", "v1")
"""As :data:`SWITCH` names them, the one that vLLM takes by default first."""
LEAST_SECONDS = 30.0
"""With less an engine would not even start."""


@dataclass(frozen=True)
class Part:
    """Tests that one pytest runs.

    Attributes:
        proves: in a few words.
        tests: in ``tests/engine``, as pytest names them.
        runner: of all its engines; empty: each test asks for its own.
    """

    proves: str
    tests: str
    runner: str = ""

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.runner}: {self.proves}" if self.runner else self.proves

    @property
    def path(self) -> str:
        """From the root of the repository."""
        return f"tests/engine/{self.tests}"

    @property
    def by_hand(self) -> str:
        """What to type to run it."""
        switch = f"{SWITCH}={self.runner} " if self.runner else ""
        return f"run {switch}python -m pytest {self.path}"


_FILES = {
    "one step ahead: oracle, naive = lazy, preemptions, aborts": "test_runner_v2.py",
    "naive = lazy, eager and from graphs": "test_identity.py",
    "policies and their scores": "test_policies.py",
    "requests with options of their own": "test_per_request.py",
    "aborts, preemptions, sharing, switches": "test_stress.py",
}
PARTS = (
    *(Part(what, file, runner) for what, file in _FILES.items() for runner in RUNNERS),
    Part("v1 = v2", "test_runner_v2.py::test_both_runners_agree_token_for_token"),
)
"""The most telling first: time may run out."""


def run_engine_tests(timeout_seconds: float) -> Iterator[Row]:
    """A row for each part: what pytest says, or why it was not asked."""
    reason = why_not()
    if reason is not None:
        yield Row(SECTION, "engine tests", "left out", note=reason)
        return
    deadline = time.monotonic() + timeout_seconds
    for part in PARTS:
        yield run_part(part, deadline - time.monotonic())


def run_part(part: Part, timeout_seconds: float) -> Row:
    """All its tests, until one fails or time is up."""
    if timeout_seconds < LEAST_SECONDS:
        note = f"no time was left; {part.by_hand}"
        return Row(SECTION, part.name, "left out", note=note)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-m", "engine", part.path],
            cwd=ROOT,
            env={**os.environ, SWITCH: part.runner},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        note = f"stopped after {timeout_seconds:.0f} s, nothing had failed; {part.by_hand}"
        return Row(SECTION, part.name, "unfinished", note=note)
    return verdict(part.name, done.returncode, done.stdout)


def verdict(name: str, returncode: int, output: str) -> Row:
    """pytest's summary as a row; of a failure, also the first line that says why."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    summary = lines[-1].strip("= ") if lines else f"pytest ended with {returncode}"
    reasons = re.findall(r"^E +(.*(?:Error|vToken).*)$", output, re.MULTILINE)
    note = reasons[0][:200] if returncode and reasons else ""
    return Row(SECTION, name, summary, ok=returncode == 0, note=note)


def why_not() -> str | None:
    """The reason not to run them, if there is one."""
    for package in ("vllm", "pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"vLLM is built for {current_platform.device_type}, not for CUDA"
    return None
