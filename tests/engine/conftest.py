"""Engine arms for the tests of this folder, started once per distinct specification."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
ARM_TIMEOUT_SECONDS = 900

Results = dict[str, dict[str, Any]]
RunArm = Callable[[dict[str, Any]], Results]


@pytest.fixture(scope="session")
def model_path() -> str:
    """Folder of the embedded model."""
    from service.embedded_model import ensure_embedded_model

    return str(ensure_embedded_model())


@pytest.fixture(scope="session")
def run_arm(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> RunArm:
    """Run an engine arm and return its results; equal specifications run once.

    Also where several processes share the tests: the results lie in a folder of all of them.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "arms"
    shared.mkdir(exist_ok=True)

    def run(spec: dict[str, Any]) -> Results:
        text = json.dumps({"model": model_path, **spec}, sort_keys=True)
        folder = shared / hashlib.sha256(text.encode()).hexdigest()[:20]
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            result = folder / "result.json"
            if not result.exists():
                _run(text, folder)
            results: Results = json.loads(result.read_text())
        return results

    return run


def _run(spec: str, folder: Path) -> None:
    """Write ``result.json`` into ``folder``, or fail the test."""
    run_program("tests.engine.arm", spec, folder, result="unfinished.json")
    (folder / "unfinished.json").rename(folder / "result.json")


def run_program(module: str, spec: str, folder: Path, *, result: str = "result.json") -> None:
    """Run an engine in a process of its own: ``python -m module SPEC RESULT``, both in ``folder``.

    A program that fails, fails the test with the end of what it said.
    """
    (folder / "spec.json").write_text(spec)
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder / "spec.json"), str(folder / result)],
        cwd=REPOSITORY,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=ARM_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{module} ended with {done.returncode}\n{spec}\n{done.stderr[-3000:]}")
