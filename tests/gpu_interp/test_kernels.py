"""Runs each file of ``kernels/`` in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "kernels"
ROOT = Path(__file__).parents[2]


@pytest.mark.gpu_interp
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_are_right_under_the_interpreter(name):
    """The file's tests pass; its output is shown otherwise."""
    env = os.environ | {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    run = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
