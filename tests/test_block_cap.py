"""A cap of blocks per request: when it is reached, what goes, how the rest is packed at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core_models import (
    BLOCK_SIZE,
    ModelPool,
    kill,
    make_config,
    make_layer,
    make_request,
    make_signals,
)
from vtoken.block_cap import capped_target, full_at
from vtoken.errors import ConfigError
from vtoken.history import ChangeInfo
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer

CAP = 6
CAPPED = {"max_blocks_per_request": CAP, "budget_tokens": 12, "policy": "random"}


def decode(layer: TokenLayer, pool: ModelPool, kv: RequestKV, num_steps: int) -> list[int]:
    """One token per step, urgent copies reported with the next; blocks held after each step."""
    held = []
    for _ in range(num_steps):
        num_tokens = kv.num_tokens + 1
        assert pool.grow(kv.req_id, num_tokens)
        layer.schedule_tokens(kv, num_tokens - 1, num_tokens)
        plans = layer.plan_relocations([(kv, num_tokens - 1)])
        assert plans == []
        for plan in layer.reclamation.take_urgent():
            assert layer.settle(plan.ticket, None) == []
        layer.evict_if_due(kv, num_tokens)
        layer.verification.check_all()
        held.append(kv.num_retained)
    return held


@pytest.mark.parametrize(
    ("num_computed", "num_live_closed", "expected"),
    [
        (64, 16, 112),  # 1 of 4 blocks full: three more
        (64, 17, 96),
        (64, 48, 80),
        (64, 64, 80),  # cannot be cut: the next end of a block
        (71, 16, 112),  # the open block is one of the four
        (71, 999, 80),
    ],
)
def test_full_at_is_where_the_last_block_of_the_cap_ends(
    num_computed: int, num_live_closed: int, expected: int
) -> None:
    """Counted from packed live tokens; never at or before the present length."""
    assert full_at(num_computed, num_live_closed, max_blocks=4, block_size=16) == expected


def test_target_leaves_one_block_to_grow_into() -> None:
    """A budget above the cap is cut to it; one below stays."""
    assert capped_target(1000, 4, 16) == 48
    assert capped_target(30, 4, 16) == 30


@pytest.mark.parametrize("policy", ["random", "streaming_llm", "paged_eviction"])
@pytest.mark.parametrize("budget", [8, 11, 20, 1000])
def test_request_never_holds_more_than_the_cap(policy: str, budget: int) -> None:
    """From the end of the prefill on, at every length; whole pages need no packing."""
    layer, pool = make_layer(**{**CAPPED, "policy": policy, "budget_tokens": budget})
    kv = make_request(layer, pool, num_tokens=BLOCK_SIZE * 7 + 2)
    held = [decode_with_signals(layer, pool, kv) for _ in range(80)]
    assert max(held) == CAP
    committed = layer.stats.counter("relocations_total", "committed")
    assert bool(committed) == (policy != "paged_eviction")
    assert not layer.stats.counter("urgent_relocations_total")


def decode_with_signals(layer: TokenLayer, pool: ModelPool, kv: RequestKV) -> int:
    """A step in which everything is observed; blocks held after it."""
    num_tokens = kv.num_tokens + 1
    assert pool.grow(kv.req_id, num_tokens)
    layer.schedule_tokens(kv, num_tokens - 1, num_tokens)
    for plan in layer.reclamation.take_urgent():
        layer.settle(plan.ticket, None)
    layer.evict_if_due(kv, num_tokens, make_signals(kv.table.live_ids()))
    layer.verification.check_all()
    return kv.num_retained


def test_eviction_is_due_when_the_blocks_are_full_and_not_before() -> None:
    """The interval plays no part: from budget to cap in one go."""
    layer, pool = make_layer(**CAPPED, evict_interval_tokens=1)
    kv = make_request(layer, pool, num_tokens=24)
    lengths: list[int] = []
    layer.evictor.listener = lambda kv, num_tokens, victims: lengths.append(num_tokens)
    layer.evict_if_due(kv, 24)
    decode(layer, pool, kv, 40)
    assert lengths == [24, 36, 48, 60]  # 12 live tokens in 3 blocks, then 3 more blocks


def test_modes_take_the_same_decisions_under_a_cap() -> None:
    """Naive evicts the same tokens at the same lengths; only lazy keeps to the cap."""
    logs, held = [], []
    for mode in ("naive", "lazy"):
        layer, pool = make_layer(**CAPPED, mode=mode)
        kv = make_request(layer, pool, num_tokens=30)
        log: list[tuple[int, list[int]]] = []
        layer.evictor.listener = lambda kv, n, victims, log=log: log.append((n, victims.tolist()))
        held.append(max(decode(layer, pool, kv, 60)))
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) >= 4
    assert held[0] > CAP == held[1]


def test_packing_gets_by_with_few_free_blocks() -> None:
    """Sources of the first plan are room for the next; with none it waits for the next cut."""
    fields = {**CAPPED, "max_source_blocks": 2, "headroom_blocks": 0, "seed": 5}
    layer, pool = make_layer(ModelPool(12), **fields)
    kv = make_request(layer, pool, num_tokens=40)
    taken = pool.allocate(1)  # one block is left, and with this seed one is emptied
    layer.evict_if_due(kv, 40)
    assert kv.num_retained == kv.ideal_blocks == 3
    assert len(layer.reclamation.take_urgent()) > 1
    pool.free(taken.tolist())


def test_without_any_free_block_nothing_is_packed() -> None:
    """Counted as ``no_headroom``."""
    layer, pool = make_layer(ModelPool(10), **CAPPED, headroom_blocks=0)
    kv = make_request(layer, pool, num_tokens=40)
    kill(layer, kv, [token for token in range(40) if token % 4 > 1])
    layer.reclamation.compact(kv, 40)
    assert layer.reclamation.take_urgent() == []
    assert layer.stats.counter("reclaim_skipped_total", "no_headroom") == 1


def test_a_failed_copy_costs_its_request() -> None:
    """What is packed at once is committed before its copy, so nothing can be rolled back."""
    layer, pool = make_layer(**CAPPED)
    kv = make_request(layer, pool, num_tokens=40)
    layer.evict_if_due(kv, 40)
    assert layer.reclamation.awaits_reports
    (plan,) = layer.reclamation.take_urgent()
    assert layer.reclamation.awaits_reports
    assert layer.settle(plan.ticket, "boom") == [kv.req_id]
    assert not layer.reclamation.awaits_reports


def test_shared_blocks_stay_where_they_are() -> None:
    """A request over the cap for their sake is cut again at the end of every block."""
    layer, pool = make_layer(**CAPPED)
    kv = make_request(layer, pool, num_tokens=40)
    for block in pool.lists["a"]:
        pool.ref[block] += 1
    layer.evict_if_due(kv, 40)
    assert layer.reclamation.take_urgent() == []
    assert kv.num_live == 12


def test_other_requests_are_still_packed_by_waste() -> None:
    """A cap for new requests only: the old ones follow θ_F and the watermark as before."""
    layer, pool = make_layer(policy="random", budget_tokens=12)
    old = make_request(layer, pool, "old", num_tokens=40)
    layer.evict_if_due(old, 40)
    changed = layer.config.patched({"max_blocks_per_request": CAP})
    layer.control.change(changed, ChangeInfo(apply_to="new"))
    plans = layer.plan_relocations([(old, 40)])
    assert [plan.req_id for plan in plans] == ["old"]


@pytest.mark.parametrize(("cap", "is_allowed"), [(2, False), (3, True)])
def test_cap_must_hold_what_is_always_kept(cap: int, is_allowed: bool) -> None:
    """At start and live: one block to grow into beside sinks and recent tokens."""
    fields: dict[str, Any] = {"sink_tokens": 2, "recent_tokens": 5, "budget_tokens": 8}
    live, _ = make_layer(**fields)
    if is_allowed:
        TokenLayer(make_config(**fields, max_blocks_per_request=cap), ModelPool())
        live.control.patch({"max_blocks_per_request": cap})
        live.control.patch({"max_blocks_per_request": None})
        assert live.config.max_blocks_per_request is None
        return
    with pytest.raises(ConfigError, match=r"\(max_blocks_per_request - 1\) \* 4 > .* = 7"):
        TokenLayer(make_config(**fields, max_blocks_per_request=cap), ModelPool())
    with pytest.raises(ConfigError, match="max_blocks_per_request"):
        live.control.patch({"max_blocks_per_request": cap})
