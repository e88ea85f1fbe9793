"""What a violation of I1 leads to on the real engine: copies that write wrong bytes, per level."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.workloads import EVICTING, PROMPT_LENGTHS, make_workload, on_tiny_model

pytestmark = pytest.mark.engine

NUM_TOKENS = 96


def make_spec() -> dict[str, Any]:
    """A relocation in every second step or so, each with its tokens' bytes mixed up."""
    full = {"policy": "random", "mode": "lazy", "verify": "full"}
    return {
        **on_tiny_model(dtype="bfloat16"),
        "vtoken": {**EVICTING, "mode": "lazy", "evict_interval_tokens": 2, "verify": "sampled"},
        "workloads": [
            make_workload("random", NUM_TOKENS, name="sampled"),
            make_workload("random", NUM_TOKENS, name="full", patch=full, may_stop=True),
        ],
        "mutant": "corrupt_copy",
    }


def test_sampled_stops_relocation_and_keeps_serving(run_arm: RunArm) -> None:
    """The first sampled batch is found wrong and rolled back; from then on nothing moves."""
    result = run_arm(make_spec())["sampled"]
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
    stopped = run_arm(make_spec())["full"]["stopped"]
    assert "InvariantViolationError: invariant I1 violated: request r" in stopped
    assert "tokens, digest" in stopped
    assert "became" in stopped
