"""Every policy on a real engine: budgets, protection, identity, determinism, any switch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.workloads import (
    NOTHING_EVICTED,
    in_mode,
    make_prompts,
    make_workload,
    on_tiny_model,
    outcome,
)
from vtoken.policies.registry import POLICIES

pytestmark = [pytest.mark.engine, pytest.mark.identity]

EVICTING = sorted(name for name in POLICIES if POLICIES[name].evicts)
BUDGET, SINKS, RECENT, INTERVAL, BLOCK = 96, 4, 16, 16, 16
PROMPT_LENGTHS = (70, 150, 333, 411, 150)
"""One below the budget, two equal ones of different texts, none a multiple of the block."""
SWITCH_STEPS = 3
CAP = 8
CAPPED = ("random", "h2o", "paged_eviction")
DOCUMENT = {
    "evict_interval_tokens": INTERVAL,
    "score_interval_steps": None,
    "max_blocks_per_request": None,
}
"""What the last workloads of a mode change, as it is at the beginning of the next."""


def every_pair(names: list[str]) -> list[str]:
    """A sequence in which each name follows each other one (an Euler circuit)."""
    left = {name: [other for other in names if other != name] for name in names}
    path, circuit = [names[0]], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return circuit


SWITCHES = every_pair(sorted(POLICIES))


def make_spec() -> dict[str, Any]:
    """All policies one after the other, one of them again, then a switch every few steps, then a
    cap of blocks per request; all in both modes of one engine."""
    workloads = [
        make_workload(policy, 60, prompts=make_prompts(PROMPT_LENGTHS), logprobs=2)
        for policy in EVICTING
    ]
    workloads[0]["patch"] |= DOCUMENT
    again = {**workloads[0], "name": "again", "patch": {"policy": "h2o"}}
    # Intervals shorter than a policy's turn: each evicts at least once before the next comes.
    switching = {
        "name": "switching",
        "patch": {**DOCUMENT, "evict_interval_tokens": 2, "score_interval_steps": 1},
        "patch_steps": [[i * SWITCH_STEPS, {"policy": p}] for i, p in enumerate(SWITCHES)],
        "prompts": make_prompts((130, 200)),
        "max_tokens": len(SWITCHES) * SWITCH_STEPS,
        "logprobs": 2,
    }
    own = {"evict_interval_tokens": 1, "score_interval_steps": 8, "max_blocks_per_request": CAP}
    capped = [
        {**workloads[0], "name": f"capped {policy}", "patch": {"policy": policy, **own}}
        for policy in CAPPED
    ]
    return {
        **on_tiny_model(dtype="bfloat16"),
        "vtoken": {
            "mode": "naive",
            "budget_tokens": BUDGET,
            "sink_tokens": SINKS,
            "recent_tokens": RECENT,
            "theta_f": 0.0,
            "low_watermark_ratio": 1.0,
            "record_evictions": True,
            "verify": "full",
        },
        "workloads": [
            in_mode("naive", NOTHING_EVICTED),
            *(
                in_mode(mode, one)
                for mode in ("naive", "lazy")
                for one in (*workloads, again, switching, *capped)
            ),
        ],
    }


def run(run_arm: RunArm, mode: str, name: str) -> dict[str, Any]:
    """The result of one workload."""
    return run_arm(make_spec())[f"{mode} {name}"]


@pytest.mark.parametrize("policy", EVICTING)
def test_naive_and_lazy_agree_bit_for_bit(run_arm: RunArm, policy: str) -> None:
    """Scores, victims, tokens and logprobs do not depend on where tokens lie."""
    naive, lazy = run(run_arm, "naive", policy), run(run_arm, "lazy", policy)
    assert outcome(naive) == outcome(lazy)
    relocated = lazy["counters"]["relocations_total/committed"]
    assert relocated == 0 if POLICIES[policy].whole_pages else relocated > 0


@pytest.mark.parametrize("policy", EVICTING)
def test_every_eviction_ends_exactly_at_the_budget(run_arm: RunArm, policy: str) -> None:
    """Due at the end of the prefill and then every interval; whole pages round down."""
    result = run(run_arm, "lazy", policy)
    for req_id, prompt in zip(result["ids"], result["prompts"], strict=True):
        log = [(n, ids) for name, n, ids in result["evictions"] if name == req_id]
        dead: set[int] = set()
        for num_tokens, ids in log:
            assert (num_tokens - len(prompt)) % INTERVAL == 0
            assert not dead & set(ids)
            dead |= set(ids)
            excess = num_tokens - len(dead) - BUDGET
            assert 0 <= excess < BLOCK if POLICIES[policy].whole_pages else excess == 0
        expected = [n for n in range(len(prompt), len(prompt) + 60, INTERVAL) if n > BUDGET]
        if not POLICIES[policy].whole_pages:
            assert [n for n, _ in log] == expected
    assert not result["counters"].get(f"policy_errors_total/{policy}")


@pytest.mark.parametrize("policy", EVICTING)
def test_sinks_and_recent_tokens_survive(run_arm: RunArm, policy: str) -> None:
    """In every single eviction."""
    evictions = run(run_arm, "lazy", policy)["evictions"]
    assert evictions
    for _, num_tokens, ids in evictions:
        assert min(ids) >= SINKS
        assert max(ids) < num_tokens - RECENT


@pytest.mark.parametrize("policy", CAPPED)
def test_capped_requests_are_packed_at_once(run_arm: RunArm, policy: str) -> None:
    """Nobody holds more blocks after any step; bits and decisions are those of naive."""
    naive, lazy = (run(run_arm, mode, f"capped {policy}") for mode in ("naive", "lazy"))
    assert outcome(naive) == outcome(lazy)
    assert max(step[2] for step in lazy["trace"]) <= CAP * len(PROMPT_LENGTHS)
    packed = lazy["counters"]["relocations_total/committed"]
    assert packed == 0 if POLICIES[policy].whole_pages else packed > 0
    assert lazy["counters"]["urgent_relocations_total"] == 0
    for req_id, prompt in zip(lazy["ids"], lazy["prompts"], strict=True):
        lengths = [n for name, n, _ in lazy["evictions"] if name == req_id]
        later = lengths[1:] if lengths[0] == len(prompt) else lengths
        assert later
        assert all(n % BLOCK == 0 for n in later)
    assert lazy["counters"]["invariant_checks_total/I1"] >= packed
    assert not lazy["counters"]["invariant_violations_total/I1"]


def test_policies_choose_differently(run_arm: RunArm) -> None:
    """A policy that silently did what another does would pass everything else."""
    chosen = {str([ids for _, _, ids in run(run_arm, "lazy", p)["evictions"]]) for p in EVICTING}
    assert len(chosen) == len(EVICTING)


def test_the_same_load_is_evicted_in_the_same_way(run_arm: RunArm) -> None:
    """Scores of earlier requests in the same rows leave no trace."""
    first, again = run(run_arm, "lazy", "h2o"), run(run_arm, "lazy", "again")
    assert [e[1:] for e in first["evictions"]] == [e[1:] for e in again["evictions"]]
    assert first["tokens"] == again["tokens"]


def test_any_switch_of_policy_is_safe(run_arm: RunArm) -> None:
    """Each policy follows each other one on running requests; nobody loses what is protected."""
    assert set(pairwise(SWITCHES)) == {(a, b) for a in POLICIES for b in POLICIES if a != b}
    naive, lazy = run(run_arm, "naive", "switching"), run(run_arm, "lazy", "switching")
    assert outcome(naive) == outcome(lazy)
    counters = lazy["counters"]
    for policy in EVICTING:
        if not POLICIES[policy].whole_pages:  # a turn is too short to fill a page
            assert counters[f"evicted_tokens_total/{policy}"] > 0, policy
        assert not counters.get(f"policy_errors_total/{policy}")
        postponed = counters[f"evictions_postponed_total/{policy}"]
        attention = [s for s in POLICIES[policy].signals if s.startswith("attention")]
        assert postponed > 0 if attention else postponed == 0
    assert counters["invariant_checks_total/I1"] > 0
    for invariant in ("I1", "I2", "I4"):
        assert counters[f"invariant_violations_total/{invariant}"] == 0
    for _, num_tokens, ids in lazy["evictions"]:
        assert min(ids) >= SINKS
        assert max(ids) < num_tokens - RECENT
