"""A slice of ``scripts/soak`` for CI, and the whole of it for the night."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.engine.conftest import REPOSITORY, RunArm
from tests.engine.soak import failures, make_soak_spec

pytestmark = pytest.mark.engine

NUM_REQUESTS = 160
MAX_MINUTES = 8


def run_slice(run_arm: RunArm) -> dict[str, Any]:
    """Half a minute of it on a free core."""
    soak = {"num_requests": NUM_REQUESTS, "max_minutes": MAX_MINUTES, "seed": 2}
    return run_arm({**make_soak_spec(), "workloads": [{"name": "soak", "soak": soak}]})["soak"]


def test_a_slice_of_the_soak_finds_nothing(run_arm: RunArm) -> None:
    """No invariant violated, no cached byte changed, nothing left, no request cut short."""
    report = run_slice(run_arm)
    report["growth_mib"] = 0  # so short a run is all warm-up
    assert failures(report) == []


def test_the_slice_reached_every_phase(run_arm: RunArm) -> None:
    """Relocations, roll-backs, aborts in flight, resets, pressure and changes all happened."""
    report = run_slice(run_arm)
    counters = report["counters"]
    assert report["submitted"] == NUM_REQUESTS
    assert report["changes"] >= 5
    assert report["resets"] >= 1
    assert report["aborted"]["in_flight"] >= 1
    assert report["cached_blocks_compared"] >= 100
    assert counters["relocations_total/committed"] >= 50
    assert counters["preemptions_total"] + counters["preemptions_avoided_total"] >= 1
    assert counters["invariant_checks_total/I1"] >= counters["relocations_total/committed"]


def test_failures_are_named() -> None:
    """A soak that left something behind says what."""
    report = {
        "left": {"blocks": 2, "rows": 0},
        "cut_short": 1,
        "submitted": 10,
        "finished": 6,
        "aborted": {"random": 3},
        "cached_blocks_changed": 1,
        "growth_threads": 1,
        "growth_mib": 1e3,
        "counters": {"invariant_violations_total/I1": 1.0, "relocations_total/failed": 2.0},
    }
    assert len(failures(report)) == 8
    assert failures(report)[0] == "2 blocks left behind"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ten_thousand_requests_within_half_an_hour() -> None:
    """The whole soak, as ``scripts/soak`` runs it."""
    command = [sys.executable, "-m", "tests.engine.soak", "--requests", "10000"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert '"submitted": 10000' in done.stdout
