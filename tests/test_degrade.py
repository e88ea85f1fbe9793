"""What a violation leads to: under ``sampled`` relocation stops and serving goes on."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from tests.core_models import ModelPool, kill, make_layer, make_request
from vtoken import reservations
from vtoken.errors import InvariantViolationError
from vtoken.planner import build_moves
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_layer import TokenLayer
from vtoken.types import RelocationMoves
from vtoken.verification import SAMPLED_VERIFY_INTERVAL


def make_planned() -> tuple[TokenLayer, ModelPool, RequestKV, RelocationPlan]:
    """A request with a sampled plan in flight: 5 live tokens in 5 blocks."""
    layer, pool, kv = make_holes()
    (plan,) = layer.plan_relocations([(kv, 17)])
    return layer, pool, kv, plan


def make_holes(level: str = "sampled") -> tuple[TokenLayer, ModelPool, RequestKV]:
    """A request worth relocating; the next batch is one that ``sampled`` looks at."""
    layer, pool = make_layer(policy="none", verify=level)
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [token for token in range(1, 16) if token % 4])
    layer.reclamation._next_ticket = SAMPLED_VERIFY_INTERVAL
    return layer, pool, kv


def assert_stopped(layer: TokenLayer, invariant: str) -> None:
    """Mode naive, counted, visible, and nothing is planned any more."""
    assert layer.config.mode == "naive"
    assert layer.control.relocation_disabled is not None
    assert f"invariant {invariant} violated: request a" in layer.control.relocation_disabled
    assert layer.pool_state()["relocation_disabled"] == 1
    assert layer.pool_state()["headroom_blocks"] == 0
    assert layer.stats.counter("invariant_violations_total", invariant) == 1
    assert layer.snapshot()["config"]["mode"] == "naive"
    assert layer.plan_relocations([(kv, 17) for kv in layer.requests.values()]) == []


def test_wrong_bytes_are_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    """The sources are intact: the request goes on, one error names the digests."""
    layer, pool, _, plan = make_planned()
    blocks = list(pool.lists["a"])
    with caplog.at_level(logging.ERROR):
        assert not layer.verification.check_conservation("a", 4, "abc", "abd")
        assert layer.settle(plan.ticket, None, {"a"}) == []
    assert pool.lists["a"] == blocks
    assert layer.stats.counter("relocations_total", "failed") == 1
    (record,) = caplog.records
    assert "digest abc became abd" in record.getMessage()
    assert_stopped(layer, "I1")
    layer.verification.check_all()
    pool.check_integrity()


def test_wrong_bytes_after_an_early_commit_end_their_request_only() -> None:
    """The sources are gone, and with them the bytes of this request."""
    layer, pool = make_layer(policy="none", verify="sampled")
    kvs = [make_request(layer, pool, name, num_tokens=17) for name in ("a", "b")]
    for kv in kvs:
        kill(layer, kv, [token for token in range(1, 16) if token % 4])
    layer.reclamation._next_ticket = SAMPLED_VERIFY_INTERVAL
    plans = layer.plan_relocations([(kv, 17) for kv in kvs])
    assert len(plans) == 2
    assert layer.reclaim_now()
    assert not layer.verification.check_conservation("a", 4, "abc", "abd")
    assert layer.settle(plans[0].ticket, None, {"a"}) == ["a"]
    assert layer.stats.counter("relocations_total", "failed") == 1
    assert layer.stats.counter("relocations_total", "committed") == 1
    assert_stopped(layer, "I1")


def test_copies_in_flight_are_not_trusted_any_more() -> None:
    """Nobody hashed them, so their sources are kept instead."""
    layer, pool, _, plan = make_planned()
    assert not layer.verification.check_conservation("other", 4, "abc", "abd")
    assert layer.settle(plan.ticket, None) == []
    assert layer.stats.counter("relocations_total", "rolled_back") == 1
    assert layer.stats.counter("relocations_total", "committed") == 0
    pool.check_integrity()


def test_broken_mapping_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: two tokens on one slot cannot be told apart again."""
    layer, _, kv, plan = make_planned()
    kv.table._slot[16] = plan.dst_blocks[0] * kv.block_size + 1
    monkeypatch.setattr(type(kv.table), "apply_moves", lambda *_: None)
    assert layer.settle(plan.ticket, None) == ["a"]
    assert_stopped(layer, "I2")


def test_wrong_plan_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """I4: its destinations go back, the request keeps its blocks."""
    layer, pool, kv = make_holes()
    monkeypatch.setattr(pool, "allocate", lambda n: ModelPool.allocate(pool, 4))
    assert layer.plan_relocations([(kv, 17)]) == []
    assert kv.plan is None
    assert layer.reclamation.num_in_flight == 0
    assert_stopped(layer, "I4")
    pool.check_integrity()


def test_operator_may_switch_relocation_on_again() -> None:
    """Setting the mode is the way back; other changes are not."""
    layer, _, kv, plan = make_planned()
    version = layer.policy_version
    layer.verification.check_conservation("a", 4, "abc", "abd")
    assert layer.policy_version == version + 1, "a stale If-Match must not undo it"
    layer.settle(plan.ticket, None, {"a"})
    layer.control.patch({"theta_f": 0.1})
    assert layer.pool_state()["relocation_disabled"] == 1
    layer.control.patch({"mode": "lazy"})
    assert layer.pool_state()["relocation_disabled"] == 0
    assert layer.plan_relocations([(kv, 17)])


def test_full_raises_instead() -> None:
    """A debugging level: the engine stops where it happens."""
    layer, _, _ = make_holes("full")
    with pytest.raises(InvariantViolationError, match="digest abc became abd"):
        layer.verification.check_conservation("a", 4, "abc", "abd")
    assert layer.config.mode == "lazy"


def _move_to_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that leaves a gap in the destinations."""

    def build(*args: Any) -> RelocationMoves:
        moves = build_moves(*args)
        return dataclasses.replace(moves, dst_slots=moves.dst_slots[::-1].copy())

    monkeypatch.setattr(reservations, "build_moves", build)


@pytest.mark.parametrize("capped", [False, True])
def test_wrong_urgent_plan_stops_relocation(monkeypatch: pytest.MonkeyPatch, capped: bool) -> None:
    """Checked before it is committed: nothing was changed, and no further plan is made."""
    layer, pool, kv = make_holes()
    _move_to_wrong_slots(monkeypatch)
    blocks, slots = list(pool.lists["a"]), kv.table.live_slots().tolist()
    if capped:
        layer.reclamation.compact(kv, 17)
    else:
        assert not layer.reclaim_now()
    assert layer.reclamation.take_urgent() == []
    assert (pool.lists["a"], kv.table.live_slots().tolist()) == (blocks, slots)
    assert layer.stats.counter("relocations_total", "failed") == 1
    assert_stopped(layer, "I4")
    pool.check_integrity()


def test_wrong_urgent_plan_stops_the_engine_under_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a wrong plan of any other kind."""
    layer, _, _ = make_holes("full")
    _move_to_wrong_slots(monkeypatch)
    with pytest.raises(InvariantViolationError, match="I4"):
        layer.reclaim_now()


@pytest.mark.parametrize(("level", "num_checks"), [("off", 0), ("sampled", 1), ("full", 1)])
def test_urgent_plans_are_checked_like_others(level: str, num_checks: int) -> None:
    """I4 is counted for them, too."""
    layer, _, _ = make_holes(level)
    assert layer.reclaim_now()
    assert layer.stats.counter("invariant_checks_total", "I4") == num_checks
