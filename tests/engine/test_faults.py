"""Faults are contained: the relocation or the request is lost, never the engine or a neighbour."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import test_identity, test_pressure
from tests.engine.conftest import RunArm

pytestmark = pytest.mark.engine


def make_flaky_identity_spec() -> dict[str, Any]:
    """The lazy arm of the identity test, with every third copy failing."""
    return {**test_identity.make_spec("lazy", True), "mutant": "flaky_copy"}


@pytest.mark.identity
def test_failed_copies_change_no_bit(run_arm: RunArm) -> None:
    """A failed relocation is rolled back: outputs equal those of naive, and nothing leaks."""
    naive = run_arm(test_identity.make_spec("naive", True))["random"]
    flaky = run_arm(make_flaky_identity_spec())["random"]
    assert flaky["counters"]["relocations_total/failed"] >= 5
    assert flaky["counters"]["relocations_total/committed"] >= 5
    assert flaky["tokens"] == naive["tokens"]
    assert flaky["logprobs"] == naive["logprobs"]
    assert flaky["free_blocks"] == flaky["total_blocks"]


def test_failed_urgent_copy_ends_only_its_request(run_arm: RunArm) -> None:
    """K/V that an urgent copy lost ends one request with an error; the others finish in full."""
    result = run_arm(test_pressure.make_spec("urgent", mutant="flaky_copy"))["pressure"]
    reasons = result["finish_reasons"]
    assert "error" in reasons
    assert reasons.count("length") >= 1
    for tokens, reason in zip(result["tokens"], reasons, strict=True):
        assert len(tokens) == 64 or reason == "error"
    assert result["free_blocks"] == result["total_blocks"]


@pytest.mark.identity
def test_broken_policy_keeps_every_token(run_arm: RunArm) -> None:
    """A policy that breaks its contract is refused and counted; outputs are those of none."""
    spec = test_identity.make_spec("lazy", True)
    workload = {**spec["workloads"][1], "max_tokens": 40}
    broken = run_arm({**spec, "workloads": [workload], "mutant": "broken_policy"})["random"]
    none = {**workload, "name": "none", "patch": {"policy": "none"}}
    unharmed = run_arm({**spec, "workloads": [none]})["none"]
    assert broken["counters"]["policy_errors_total/random"] >= 4
    assert broken["counters"]["evicted_tokens_total/random"] == 0
    assert broken["tokens"] == unharmed["tokens"]
