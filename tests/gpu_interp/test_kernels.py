"""Runs the files of ``kernels/`` in a process in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu_interp, pytest.mark.timeout(900)]

FOLDER = Path(__file__).parent / "kernels"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], list[ET.Element]]:
    """One run of all files, and the report on each test: importing vLLM takes longest."""
    report = tmp_path_factory.mktemp("kernels") / "report.xml"
    env = os.environ | {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    run = subprocess.run(
        [*command, "--junitxml", str(report)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    return run, list(ET.parse(report).iter("testcase")) if report.exists() else []


def failures(cases: list[ET.Element]) -> Iterator[str]:
    """What those that did not pass said."""
    for case in cases:
        for part in case:
            if part.tag in ("failure", "error"):
                yield f"{case.get('name')}\n{part.text}"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("test_*.py")))
def test_kernels_are_right_under_the_interpreter(done, name):
    """The file's tests pass; what they said is shown otherwise."""
    run, cases = done
    own = [case for case in cases if case.get("classname", "").split(".")[-1] == name]
    assert own, run.stdout[-6000:] + run.stderr[-2000:]
    assert not list(failures(own))


def test_no_kernel_test_was_skipped(done):
    """The run as a whole ended well, and nothing was left out."""
    run, cases = done
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert not [case.get("name") for case in cases if case.find("skipped") is not None]
