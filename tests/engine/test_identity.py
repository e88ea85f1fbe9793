"""With the same evictions, outputs do not depend on where tokens lie.

An engine runs everything in mode naive, then in lazy; a compiled one then has faults, too.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.workloads import (
    EVICTING,
    in_mode,
    make_workload,
    on_tiny_model,
    outcome,
)

pytestmark = [pytest.mark.engine, pytest.mark.identity]

POLICIES = ("streaming_llm", "random")
MIN_COMMITTED = 20
UNHARMED = make_workload("none", 40, name="unharmed")
FLAKY = make_workload("random", 112, name="flaky", fault=["flaky_copy", [0]])
BROKEN = make_workload("random", 40, name="broken", fault=["broken_policy", [0]])
VTOKEN = {**EVICTING, "mode": "naive", "verify": "full"}


def in_both_modes() -> list[dict[str, Any]]:
    """Both policies, 8 requests, 112 tokens each."""
    workloads = [make_workload(policy, 112) for policy in POLICIES]
    return [in_mode(mode, one) for mode in ("naive", "lazy") for one in workloads]


def make_spec() -> dict[str, Any]:
    """The embedded model, step by step."""
    return {"vtoken": VTOKEN, "engine": {"dtype": "bfloat16"}, "workloads": in_both_modes()}


def make_compiled_spec(*, is_tiny: bool = True) -> dict[str, Any]:
    """Compiled, which is fast for the tiny model; then nothing is evicted, copies fail, a policy
    breaks its contract."""
    engine = {"dtype": "bfloat16", "enforce_eager": False}
    faults = [in_mode("lazy", one) for one in (UNHARMED, FLAKY, BROKEN)]
    return {
        **(on_tiny_model(**engine) if is_tiny else {"engine": engine}),
        "vtoken": VTOKEN,
        "workloads": [*in_both_modes(), *faults],
    }


ENGINES = [
    pytest.param(make_spec, id="eager"),
    pytest.param(make_compiled_spec, id="compiled"),
    pytest.param(
        functools.partial(make_compiled_spec, is_tiny=False),
        id="compiled embedded model",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, make: Any, policy: str) -> None:
    """Tokens and logprobs are equal floats although lazy relocated tokens in between."""
    naive, lazy = (run_arm(make())[f"{mode} {policy}"] for mode in ("naive", "lazy"))
    assert lazy["counters"]["relocations_total/committed"] >= MIN_COMMITTED
    assert naive["counters"]["relocations_total/committed"] == 0
    assert outcome(naive) == outcome(lazy)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_relocation_was_verified(run_arm: RunArm, policy: str) -> None:
    """verify=full hashes K/V around each relocation (I1) and checks I2 and I4 of each plan."""
    counters = run_arm(make_spec())[f"lazy {policy}"]["counters"]
    committed = counters["relocations_total/committed"]
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_checks_total/{invariant}"] >= committed
        assert counters[f"invariant_violations_total/{invariant}"] == 0


def test_lazy_holds_fewer_blocks(run_arm: RunArm) -> None:
    """Relocation is what frees the blocks: retained blocks fall, evictions are the same."""
    naive, lazy = (run_arm(make_spec())[f"{mode} random"] for mode in ("naive", "lazy"))
    retained = [max(step[2] for step in arm["trace"][32:]) for arm in (naive, lazy)]
    assert retained[1] <= 0.6 * retained[0], retained


def test_all_blocks_return_to_the_pool(run_arm: RunArm) -> None:
    """After the last request every block is free, destinations of late plans included."""
    for make in (make_spec, make_compiled_spec):
        for result in run_arm(make()).values():
            assert result["free_blocks"] == result["total_blocks"]
