"""Faults are contained: the relocation or the request is lost, never the engine or a neighbour."""

from __future__ import annotations

import pytest

from tests.engine import test_identity, test_pressure
from tests.engine.conftest import RunArm

pytestmark = pytest.mark.engine


@pytest.mark.identity
def test_failed_copies_change_no_bit(run_arm: RunArm) -> None:
    """A failed relocation is rolled back: outputs equal those of naive, and nothing leaks."""
    results = run_arm(test_identity.make_compiled_spec())
    naive, flaky = results["naive random"], results["lazy flaky"]
    assert flaky["counters"]["relocations_total/failed"] >= 5
    assert flaky["counters"]["relocations_total/committed"] >= 5
    assert flaky["tokens"] == naive["tokens"]
    assert flaky["logprobs"] == naive["logprobs"]
    assert flaky["free_blocks"] == flaky["total_blocks"]


def test_failed_urgent_copy_ends_only_its_request(run_arm: RunArm) -> None:
    """K/V that an urgent copy lost ends one request with an error, counted as a failed relocation;
    the others finish in full."""
    result = run_arm(test_pressure.make_spec())["flaky"]
    reasons = result["finish_reasons"]
    assert 0 < reasons.count("error") <= result["counters"]["relocations_total/failed"]
    assert reasons.count("length") >= 1
    for tokens, reason in zip(result["tokens"], reasons, strict=True):
        assert len(tokens) == 64 or reason == "error"
    assert result["free_blocks"] == result["total_blocks"]


@pytest.mark.identity
def test_broken_policy_keeps_every_token(run_arm: RunArm) -> None:
    """A policy that breaks its contract is refused and counted; outputs are those of none."""
    results = run_arm(test_identity.make_compiled_spec())
    broken, unharmed = results["lazy broken"], results["lazy unharmed"]
    assert broken["counters"]["policy_errors_total/random"] >= 4
    assert broken["counters"]["evicted_tokens_total/random"] == 0
    assert broken["tokens"] == unharmed["tokens"]
