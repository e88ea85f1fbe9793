"""What a violation of I1 leads to on the real engine: copies that write wrong bytes, per level."""

from __future__ import annotations

import pytest

from tests.engine import test_per_request
from tests.engine.conftest import RunArm
from tests.engine.workloads import EVICTING, PROMPT_LENGTHS

pytestmark = pytest.mark.engine

NUM_TOKENS = test_per_request.NUM_CORRUPTED_TOKENS


def test_sampled_stops_relocation_and_keeps_serving(run_arm: RunArm) -> None:
    """The first sampled batch is found wrong and rolled back; from then on nothing moves."""
    result = run_arm(test_per_request.make_spec())["sampled"]
    counters = result["counters"]
    assert counters["invariant_violations_total/I1"] >= 1
    assert result["mode"] == "naive"
    assert "invariant I1 violated: request r" in result["relocation_disabled"]
    assert counters["relocations_total/failed"] >= 1
    excess = sum(n + NUM_TOKENS - EVICTING["budget_tokens"] for n in PROMPT_LENGTHS)
    assert counters["evicted_tokens_total/random"] > 0.9 * excess, "eviction goes on"
    assert result["finish_reasons"] == ["length"] * 8
    assert [len(tokens) for tokens in result["tokens"]] == [NUM_TOKENS] * 8
    assert result["free_blocks"] == result["total_blocks"]


def test_full_stops_the_engine_with_the_numbers(run_arm: RunArm) -> None:
    """A debugging level: the first wrong byte ends the run and says what was expected."""
    stopped = run_arm(test_per_request.make_spec())["full"]["stopped"]
    assert "InvariantViolationError: invariant I1 violated: request r" in stopped
    assert "tokens, digest" in stopped
    assert "became" in stopped
