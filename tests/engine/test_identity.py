"""With the same evictions, outputs do not depend on where tokens lie."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.workloads import EVICTING, make_workload

pytestmark = [pytest.mark.engine, pytest.mark.identity]

POLICIES = ("streaming_llm", "random")
MIN_COMMITTED = 20


def make_spec(mode: str, eager: bool) -> dict[str, Any]:
    """Both policies, 8 requests, 112 tokens each, in one engine."""
    return {
        "vtoken": {**EVICTING, "mode": mode, "verify": "full"},
        "engine": {"dtype": "bfloat16", "enforce_eager": eager},
        "workloads": [make_workload(policy, 112) for policy in POLICIES],
    }


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, eager: bool, policy: str) -> None:
    """Tokens and logprobs are equal floats although lazy relocated tokens in between."""
    naive = run_arm(make_spec("naive", eager))[policy]
    lazy = run_arm(make_spec("lazy", eager))[policy]
    assert lazy["counters"]["relocations_total/committed"] >= MIN_COMMITTED
    assert naive["counters"]["relocations_total/committed"] == 0
    assert naive["evictions"] == lazy["evictions"]
    assert naive["tokens"] == lazy["tokens"]
    assert naive["logprobs"] == lazy["logprobs"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_relocation_was_verified(run_arm: RunArm, policy: str) -> None:
    """verify=full hashes K/V around each relocation (I1) and checks I2 and I4 of each plan."""
    counters = run_arm(make_spec("lazy", True))[policy]["counters"]
    committed = counters["relocations_total/committed"]
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_checks_total/{invariant}"] >= committed
        assert counters[f"invariant_violations_total/{invariant}"] == 0


def test_lazy_holds_fewer_blocks(run_arm: RunArm) -> None:
    """Relocation is what frees the blocks: retained blocks fall, evictions are the same."""
    naive = run_arm(make_spec("naive", True))["random"]
    lazy = run_arm(make_spec("lazy", True))["random"]
    retained = [max(step[2] for step in arm["trace"][32:]) for arm in (naive, lazy)]
    assert retained[1] <= 0.6 * retained[0], retained


def test_all_blocks_return_to_the_pool(run_arm: RunArm) -> None:
    """After the last request every block is free, destinations of late plans included."""
    for mode in ("naive", "lazy"):
        for result in run_arm(make_spec(mode, True)).values():
            assert result["free_blocks"] == result["total_blocks"]
