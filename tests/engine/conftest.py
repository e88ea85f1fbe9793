"""Engine arms for the tests of this folder, started once per distinct specification."""

from __future__ import annotations

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
    """Run an engine arm and return its results; equal specifications run once."""
    cache: dict[str, Results] = {}

    def run(spec: dict[str, Any]) -> Results:
        text = json.dumps({"model": model_path, **spec}, sort_keys=True)
        if text not in cache:
            cache[text] = _run(text, tmp_path_factory.mktemp("arm"))
        return cache[text]

    return run


def _run(spec: str, folder: Path) -> Results:
    (folder / "spec.json").write_text(spec)
    command = [sys.executable, "-m", "tests.engine.arm"]
    done = subprocess.run(
        [*command, str(folder / "spec.json"), str(folder / "result.json")],
        cwd=REPOSITORY,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=ARM_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"arm ended with {done.returncode}\n{spec}\n{done.stderr[-2500:]}")
    results: Results = json.loads((folder / "result.json").read_text())
    return results
