"""Copy-on-write reclamation (``relocate_shared``): holders of shared blocks let go together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core_models import ModelPool, fail_allocations, kill, make_layer, make_request
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_layer import TokenLayer

SHARED = [("p", i) for i in range(4)]
NUM_BLOCKS = 32
FIRST_OF_EACH = [token for token in range(16) if token % 4]  # victims: one of four stays


def make_holders(
    names: str = "ab", victims: list[int] = FIRST_OF_EACH, **fields: Any
) -> tuple[TokenLayer, ModelPool, list[RequestKV]]:
    """Requests of 17 tokens; their first four blocks of four are shared."""
    fields = {"policy": "none", "verify": "full", "relocate_shared": True, **fields}
    layer, pool = make_layer(ModelPool(NUM_BLOCKS), **fields)
    holders = []
    for name in names:
        kv = make_request(layer, pool, name, num_tokens=17, hashes=SHARED)
        pool.cache_full_blocks(name, SHARED)
        holders.append(kv)
    for kv in holders:
        kill(layer, kv, victims)
    return layer, pool, holders


def plan(layer: TokenLayer, holders: list[RequestKV]) -> list[RelocationPlan]:
    """Look for work."""
    return layer.plan_relocations([(kv, 17) for kv in holders])


def test_shared_blocks_stay_by_default() -> None:
    """Off unless asked for."""
    layer, _, holders = make_holders(relocate_shared=False)
    assert plan(layer, holders) == []


def test_holders_let_go_in_one_batch() -> None:
    """Two holders of four blocks: two destinations, four blocks become free, nothing is lost."""
    layer, pool, holders = make_holders()
    shared = pool.lists["a"][:4]
    plans = plan(layer, holders)
    assert [p.req_id for p in plans] == ["a", "b"]
    assert {p.ticket for p in plans} == {1}
    assert all(p.source_indices.tolist() == [0, 1, 2, 3] for p in plans)
    assert not {b for p in plans for b in p.dst_blocks.tolist()} & set(shared)
    layer.settle(1, None)
    layer.verification.check_all()
    assert pool.num_free_blocks() == NUM_BLOCKS - 4  # two tails, two destinations
    assert [kv.table.live_ids().tolist() for kv in holders] == [[0, 4, 8, 12, 16]] * 2
    assert layer.stats.counter("freed_blocks_total", "relocation") == 2
    assert layer.stats.counter("shared_relocations_total") == 1
    pool.check_integrity()


def test_released_blocks_stay_findable() -> None:
    """Their content is untouched: the next request with this prefix still finds all of it."""
    layer, pool, holders = make_holders()
    shared = pool.lists["a"][:4]
    plan(layer, holders)
    layer.settle(1, None)
    assert pool.start_request("c", SHARED) == 4
    assert pool.lists["c"] == shared


@pytest.mark.parametrize("victims", [[1, 5, 9, 13], [1, 2, 5, 6, 9, 10, 13, 14]])
def test_no_plan_without_gain(victims: list[int]) -> None:
    """Two holders with half or more of each block live would need as many blocks as they free."""
    layer, _, holders = make_holders(victims=victims)
    assert plan(layer, holders) == []


def test_a_holder_that_does_not_take_part_keeps_the_blocks() -> None:
    """Not scheduled in this step, or without eviction: then nobody copies."""
    layer, _, holders = make_holders("abc")
    assert plan(layer, holders[:2]) == []
    layer, pool, holders = make_holders()
    make_request(layer, pool, "new", num_tokens=17, hashes=SHARED)
    assert plan(layer, [*holders, layer.requests["new"]]) == []


def test_holders_that_cannot_all_move_stay() -> None:
    """The second holder gets no destinations: what the first one got goes back."""
    layer, pool, holders = make_holders()
    fail_allocations(pool, 2)
    assert plan(layer, holders) == []
    assert [kv.plan for kv in holders] == [None, None]
    assert layer.stats.counter("shared_relocations_total") == 0
    pool.check_integrity()
    assert len(plan(layer, holders)) == 2


def test_holders_that_ended_cost_nothing() -> None:
    """The last holder's block is private, and moves as one."""
    layer, pool, holders = make_holders()
    layer.forget("b")
    pool.release("b")
    (only,) = plan(layer, holders[:1])
    layer.settle(only.ticket, None)
    assert layer.stats.counter("shared_relocations_total") == 0
    assert layer.stats.counter("freed_blocks_total", "relocation") == 3


def test_failed_copy_rolls_all_holders_back() -> None:
    """Every reference is as before and the destinations are free."""
    layer, pool, holders = make_holders()
    free, shared = pool.num_free_blocks(), pool.lists["a"][:4]
    plan(layer, holders)
    layer.settle(1, "boom")
    assert pool.num_free_blocks() == free
    assert pool.lists["a"][:4] == pool.lists["b"][:4] == shared
    pool.check_integrity()


def test_abort_of_one_holder_still_frees_the_blocks() -> None:
    """The one that ended drops its references anyway."""
    layer, pool, holders = make_holders()
    plan(layer, holders)
    layer.forget("b")
    pool.release("b")
    layer.settle(1, None)
    assert pool.num_free_blocks() == NUM_BLOCKS - 2
    assert layer.stats.counter("freed_blocks_total", "relocation") == 3
    pool.check_integrity()


def test_late_holder_keeps_the_blocks_and_the_counter_honest() -> None:
    """A request that finds the prefix between plan and commit: no block is freed, none counted."""
    layer, pool, holders = make_holders()
    plan(layer, holders)
    assert pool.start_request("late", SHARED) == 4
    layer.settle(1, None)
    assert layer.stats.counter("freed_blocks_total", "relocation") == 0
    assert [pool.ref[block] for block in pool.lists["late"]] == [1] * 4
    pool.release("late")
    assert pool.num_free_blocks() == NUM_BLOCKS - 4
    pool.check_integrity()
