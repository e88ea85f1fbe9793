"""ReclamationManager: when it looks, what it reserves, and how a plan ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core_models import ModelPool, fail_allocations, kill, make_layer, make_request
from vtoken.errors import PlanError
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import RELOCATION_OUTCOMES
from vtoken.token_layer import TokenLayer

HALF = [token for token in range(1, 16) if token % 4]  # leaves 0, 4, 8, 12 and the tail


def make_holes(
    num_blocks: int = 32, victims: list[int] = HALF, **fields: Any
) -> tuple[TokenLayer, ModelPool, RequestKV]:
    """One request of 17 tokens in 5 blocks, four of them closed, with holes."""
    fields.setdefault("policy", "none")
    layer, pool = make_layer(ModelPool(num_blocks), **fields)
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, victims)
    kv.row_stale = False
    return layer, pool, kv


def plan_one(layer: TokenLayer, kv: RequestKV) -> RelocationPlan:
    """The one plan that must come out."""
    plans = layer.plan_relocations([(kv, 17)])
    assert len(plans) == 1
    return plans[0]


def skipped(layer: TokenLayer) -> dict[str, float]:
    """Reasons counted so far."""
    rows = layer.stats.snapshot()["counters"]["reclaim_skipped_total"]
    return {labels[0]: value for labels, value in rows if value}


# -- stage 1 -------------------------------------------------------------------------------


def test_no_plan_while_waste_is_at_most_theta() -> None:
    """F > θ_F is strict: equality waits."""
    layer, _, kv = make_holes(theta_f=0.75)  # F = 1 − 5 / 20
    assert layer.occupancy.waste_ratio == 0.75
    assert layer.plan_relocations([(kv, 17)]) == []
    assert skipped(layer) == {"below_theta_f": 1}
    layer.control.patch({"theta_f": 0.74})
    assert len(layer.plan_relocations([(kv, 17)])) == 1


def test_no_plan_while_the_pool_is_roomy() -> None:
    """Relocation waits until free blocks are at or below the watermark."""
    layer, _, kv = make_holes(num_blocks=10, low_watermark_ratio=0.4)  # 5 of 10 are free
    assert layer.plan_relocations([(kv, 17)]) == []
    assert skipped(layer) == {"above_watermark": 1}
    layer.control.patch({"low_watermark_ratio": 0.5})
    assert len(layer.plan_relocations([(kv, 17)])) == 1


def test_looks_every_check_interval() -> None:
    """The first step looks, then every n-th."""
    layer, _, kv = make_holes(theta_f=0.9, check_interval_steps=3)
    looks = []
    for _ in range(7):
        before = skipped(layer).get("below_theta_f", 0)
        layer.plan_relocations([(kv, 17)])
        looks.append(skipped(layer).get("below_theta_f", 0) - before)
    assert looks == [1, 0, 0, 1, 0, 0, 1]


def test_shorter_check_interval_takes_effect_at_once() -> None:
    """A live change does not wait for the old, possibly endless, interval."""
    layer, _, kv = make_holes(theta_f=0.9, check_interval_steps=1_000_000)
    layer.plan_relocations([(kv, 17)])
    layer.control.patch({"check_interval_steps": 1, "theta_f": 0.0})
    assert len(layer.plan_relocations([(kv, 17)])) == 1


@pytest.mark.parametrize("mode", ["naive", "off"])
def test_only_lazy_plans(mode: str) -> None:
    """Other modes do not even look."""
    layer, _, kv = make_holes(mode=mode)
    assert layer.plan_relocations([(kv, 17)]) == []
    assert skipped(layer) == {}


# -- stages 2 and 3 ------------------------------------------------------------------------


def test_plan_takes_destinations_and_changes_nothing_else() -> None:
    """Reserved is not committed: table, blocks and row are as before (I3)."""
    layer, pool, kv = make_holes()
    slots, blocks, free = kv.table.live_slots().tolist(), list(pool.lists["a"]), 32 - 5
    plan = plan_one(layer, kv)
    assert plan.source_indices.tolist() == [0, 1, 2, 3]
    assert plan.moves.token_ids.tolist() == [0, 4, 8, 12]
    assert pool.num_free_blocks() == free - 1
    assert kv.table.live_slots().tolist() == slots
    assert kv.blocks.ids.tolist() == pool.lists["a"] == blocks
    assert kv.plan is plan
    assert not kv.row_stale
    assert (layer.reclamation.num_in_flight, layer.reclamation.blocks_in_flight()) == (1, 1)
    pool.check_integrity(plan.dst_blocks.tolist())


def test_tail_and_later_blocks_never_move() -> None:
    """With 12 computed tokens the blocks from index 3 on stay where they are."""
    layer, _, kv = make_holes()
    (plan,) = layer.plan_relocations([(kv, 12)])
    assert plan.source_indices.tolist() == [0, 1, 2]


def test_shared_blocks_never_move() -> None:
    """A block that another request references is no source."""
    layer, pool, kv = make_holes()
    pool.touch(pool.lists["a"][1])
    plan = plan_one(layer, kv)
    assert plan.source_indices.tolist() == [0, 2, 3]


def test_at_most_b_sources() -> None:
    """``max_source_blocks`` bounds a plan."""
    layer, _, kv = make_holes(max_source_blocks=2)
    assert plan_one(layer, kv).source_indices.tolist() == [0, 1]


def test_short_headroom_shrinks_the_plan_then_defers_it() -> None:
    """Fewer free blocks give a smaller plan; none gives ``no_headroom``."""
    victims = [token for token in range(1, 33) if token % 4 > 1]  # 2 left in each of 8 blocks
    sizes = []
    for num_free in (4, 2, 1, 0):
        layer, pool = make_layer(ModelPool(9 + num_free), policy="none")
        kv = make_request(layer, pool, num_tokens=33)
        kill(layer, kv, victims)
        plans = layer.plan_relocations([(kv, 33)])
        sizes.append([len(plan.source_indices) for plan in plans])
        pool.check_integrity([b for plan in plans for b in plan.dst_blocks])
    assert sizes == [[8], [4], [2], []]
    assert skipped(layer) == {"no_headroom": 1}


def test_no_gain_is_no_plan() -> None:
    """Holes that do not add up to a block are left alone; a packed request is not looked at."""
    layer, _, kv = make_holes(victims=[5])
    assert layer.plan_relocations([(kv, 17)]) == []
    assert skipped(layer) == {"no_gain": 1}
    layer, _, kv = make_holes(victims=[])
    assert layer.plan_relocations([(kv, 17)]) == []
    assert skipped(layer) == {}


def test_at_most_one_plan_per_request() -> None:
    """While a plan is in flight its request is passed over, others are not."""
    layer, pool, kv = make_holes()
    plan_one(layer, kv)
    other = make_request(layer, pool, "b", num_tokens=17)
    kill(layer, other, HALF)
    plans = layer.plan_relocations([(kv, 17), (other, 17)])
    assert [plan.req_id for plan in plans] == ["b"]
    assert skipped(layer) == {"in_flight": 1}
    assert layer.reclamation.num_in_flight == 2


def test_batch_has_one_ticket_and_the_most_wasteful_first() -> None:
    """All plans of a step travel together; scarce destinations go where they free most."""
    layer, pool, kv = make_holes(num_blocks=32)
    small = make_request(layer, pool, "b", num_tokens=9)
    kill(layer, small, [1, 2, 3, 5, 6, 7])
    plans = layer.plan_relocations([(small, 9), (kv, 17)])
    assert [plan.req_id for plan in plans] == ["a", "b"]
    assert {plan.ticket for plan in plans} == {1}
    layer.settle(1, None)
    assert layer.plan_relocations([(small, 9), (kv, 17)]) == []
    assert layer.reclamation.num_in_flight == 0


def test_allocation_that_fails_mid_plan_costs_nobody_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others' plans go ahead, nothing leaks, and the next look makes up for it."""
    layer, pool, first = make_holes()
    requests = [first]
    for name in "bc":
        requests.append(make_request(layer, pool, name, num_tokens=17))
        kill(layer, requests[-1], HALF)
    slots = requests[1].table.live_slots().tolist()
    fail_allocations(pool, 2)
    plans = layer.plan_relocations([(kv, 17) for kv in requests])
    assert [plan.req_id for plan in plans] == ["a", "c"]
    assert skipped(layer) == {"no_headroom": 1}
    assert "no destinations for a relocation of request b" in caplog.text
    assert requests[1].plan is None
    assert requests[1].table.live_slots().tolist() == slots
    pool.check_integrity([block for plan in plans for block in plan.dst_blocks.tolist()])
    layer.settle(1, None)
    layer.verification.check_all()
    assert [p.req_id for p in layer.plan_relocations([(kv, 17) for kv in requests])] == ["b"]


def test_urgent_allocation_that_fails_leaves_everything_as_it_was() -> None:
    """Then vLLM preempts, as it would without us."""
    layer, pool, kv = make_holes()
    fail_allocations(pool, 1, 2)  # it is tried again after early evictions
    assert layer.reclaim_now() is False
    assert not layer.reclamation.awaits_reports
    assert kv.plan is None
    pool.check_integrity()
    assert layer.reclaim_now() is True


# -- settle --------------------------------------------------------------------------------


def test_commit_swaps_blocks_and_frees_sources() -> None:
    """Tokens at their copies, destination in the first source place, sources free, row stale."""
    layer, pool, kv = make_holes(verify="full")
    sources, tail = pool.lists["a"][:4], pool.lists["a"][4]
    plan = plan_one(layer, kv)
    dst = int(plan.dst_blocks[0])
    layer.settle(plan.ticket, None)
    assert pool.lists["a"] == kv.blocks.ids.tolist() == [dst, 0, 0, 0, tail]
    assert kv.table.live_slots().tolist() == [
        *range(4 * dst, 4 * dst + 4),
        4 * tail,
    ]
    assert all(block in pool.free_list for block in sources)
    assert kv.plan is None
    assert kv.row_stale
    assert layer.stats.counter("relocations_total", "committed") == 1
    assert layer.stats.counter("relocated_tokens_total") == 4
    assert layer.stats.counter("freed_blocks_total", "relocation") == 3
    assert layer.stats.counter("invariant_checks_total", "I2") == 1
    assert layer.stats.counter("invariant_checks_total", "I4") == 1
    layer.verification.check_all()
    pool.check_integrity()


def test_request_goes_on_after_a_commit() -> None:
    """New tokens, evictions and a second relocation work on the new places."""
    layer, pool, kv = make_holes()
    layer.settle(plan_one(layer, kv).ticket, None)
    assert pool.grow("a", 29)
    change = layer.schedule_tokens(kv, 17, 29)
    assert change is not None
    assert change.slots is not None
    kill(layer, kv, [4, 8, 12, 18, 19, 21, 22, 23, 25])
    (plan,) = layer.plan_relocations([(kv, 29)])
    layer.settle(plan.ticket, None)
    assert kv.table.live_ids().tolist() == [0, 16, 17, 20, 24, 26, 27, 28]
    layer.verification.check_all()
    pool.check_integrity()


def test_failed_copy_rolls_back() -> None:
    """The destinations go back, the request keeps its places and may plan again."""
    layer, pool, kv = make_holes()
    slots, blocks, free = kv.table.live_slots().tolist(), list(pool.lists["a"]), 32 - 5
    layer.settle(plan_one(layer, kv).ticket, "copy failed")
    assert kv.table.live_slots().tolist() == slots
    assert pool.lists["a"] == blocks
    assert pool.num_free_blocks() == free
    assert kv.plan is None
    assert not kv.row_stale
    assert layer.stats.counter("relocations_total", "failed") == 1
    assert layer.stats.counter("freed_blocks_total", "relocation") == 0
    assert len(layer.plan_relocations([(kv, 17)])) == 1


@pytest.mark.parametrize(
    ("error", "damaged", "outcome"),
    [(None, (), "rolled_back"), ("copy failed", (), "failed"), (None, ("a",), "failed")],
)
def test_orphan_frees_destinations_only_after_the_report(
    error: str | None, damaged: tuple[str, ...], outcome: str
) -> None:
    """The worker may still write to them, so they stay taken until it says otherwise. A copy that
    failed is counted as such, though nobody needs it any more."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    layer.forget("a")
    pool.release("a")
    assert plan.orphaned
    assert pool.num_free_blocks() == 32 - 1
    assert layer.reclamation.num_in_flight == 1
    pool.check_integrity(plan.dst_blocks.tolist())
    assert layer.settle(plan.ticket, error, damaged) == []
    assert pool.num_free_blocks() == 32
    pool.check_integrity()
    for name in RELOCATION_OUTCOMES:
        assert layer.stats.counter("relocations_total", name) == (name == outcome)
    assert layer.reclamation.num_in_flight == 0


def test_old_plan_does_not_touch_a_resumed_request() -> None:
    """Preempted and back under the same id, with a plan of its own: both end right."""
    layer, pool, kv = make_holes()
    old = plan_one(layer, kv)
    layer.forget("a")
    pool.release("a")
    resumed = make_request(layer, pool, num_tokens=17)
    kill(layer, resumed, HALF)
    new = plan_one(layer, resumed)
    slots = resumed.table.live_slots().tolist()
    layer.settle(old.ticket, None)
    assert resumed.table.live_slots().tolist() == slots
    assert resumed.plan is new
    layer.settle(new.ticket, None)
    assert resumed.blocks.retained == 2
    layer.verification.check_all()
    pool.check_integrity()


def test_source_that_empties_in_flight_waits_for_the_commit() -> None:
    """An eviction between plan and commit frees no source early; the commit does."""
    layer, pool, kv = make_holes()
    source = pool.lists["a"][1]
    plan = plan_one(layer, kv)
    kill(layer, kv, [4])
    assert pool.ref[source] == 1
    layer.settle(plan.ticket, None)
    assert pool.ref[source] == 0
    assert kv.table.live_ids().tolist() == [0, 8, 12, 16]
    assert kv.blocks.num_live.tolist() == [3, 0, 0, 0, 1]
    assert layer.stats.counter("relocated_tokens_total") == 3
    layer.verification.check_all()
    pool.check_integrity()


def test_destination_whose_tokens_all_died_is_freed_at_commit() -> None:
    """Blocks without any live token go back at once, also those that a commit brings."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    kill(layer, kv, [0, 4, 8, 12])
    layer.settle(plan.ticket, None)
    assert pool.lists["a"][:4] == kv.blocks.ids.tolist()[:4] == [0, 0, 0, 0]
    assert pool.num_free_blocks() == 31
    assert layer.stats.counter("freed_blocks_total", "empty") == 1
    assert layer.stats.counter("freed_blocks_total", "relocation") == 3
    layer.verification.check_all()
    pool.check_integrity()


def test_sources_that_emptied_are_freed_when_the_copy_fails() -> None:
    """A rollback ends the wait of sources that an eviction emptied meanwhile."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    kill(layer, kv, [4, 8])
    layer.settle(plan.ticket, "copy failed")
    assert [block != 0 for block in pool.lists["a"]] == [True, False, False, True, True]
    assert kv.blocks.ids.tolist() == pool.lists["a"]
    assert layer.stats.counter("freed_blocks_total", "empty") == 2
    layer.verification.check_all()
    pool.check_integrity()


def test_source_shared_in_flight_stays_with_its_new_holder() -> None:
    """A prefix hit between plan and commit keeps the block; only our reference goes."""
    layer, pool, kv = make_holes()
    source = pool.lists["a"][0]
    plan = plan_one(layer, kv)
    pool.touch(source)
    layer.settle(plan.ticket, None)
    assert pool.ref[source] == 1
    layer.verification.check_all()


# -- urgent --------------------------------------------------------------------------------


def test_early_commit_leaves_the_callers_batch_alone() -> None:
    """Plans that were handed out are the sender's: a later commit takes none away."""
    layer, _, kv = make_holes()
    plans = layer.plan_relocations([(kv, 17)])
    assert layer.reclaim_now()
    assert len(plans) == 1


def test_urgent_plan_is_committed_as_it_is_made() -> None:
    """It frees blocks at once, whatever θ_F and watermark say, and is handed out once."""
    layer, pool, kv = make_holes(theta_f=0.9, low_watermark_ratio=0.0)
    free = pool.num_free_blocks()
    assert layer.reclaim_now()
    assert pool.num_free_blocks() == free + 3
    assert kv.plan is None
    assert kv.row_stale
    (plan,) = layer.reclamation.take_urgent()
    assert plan.moves.token_ids.tolist() == [0, 4, 8, 12]
    assert layer.reclamation.take_urgent() == []
    assert layer.reclamation.num_in_flight == 0
    assert layer.settle(plan.ticket, None) == []
    assert layer.stats.counter("relocations_total", "committed") == 1
    assert layer.stats.counter("urgent_relocations_total") == 1
    layer.verification.check_all()
    pool.check_integrity()


def test_plans_in_flight_are_committed_before_new_ones_are_made() -> None:
    """Their sources are had without another copy; the report then finds nothing to do."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    free = pool.num_free_blocks()
    assert layer.reclaim_now()
    assert pool.num_free_blocks() == free + 4
    assert layer.reclamation.take_urgent() == []
    assert layer.reclamation.num_in_flight == 0
    assert layer.settle(plan.ticket, None) == []
    assert layer.stats.counter("relocations_total", "committed") == 1
    layer.verification.check_all()
    pool.check_integrity()


def test_early_commit_that_frees_nothing_goes_on_to_pack() -> None:
    """Sources that a prefix hit has shared meanwhile stay taken: that is no relief."""
    layer, pool, kv = make_holes()
    plan_one(layer, kv)
    for block in pool.lists["a"][:4]:
        pool.touch(block)
    assert not layer.reclaim_now()
    other = make_request(layer, pool, "b", num_tokens=17)
    kill(layer, other, HALF)
    assert layer.reclaim_now()
    assert [plan.req_id for plan in layer.reclamation.take_urgent()] == ["b"]


def test_early_commit_passes_over_orphans() -> None:
    """A plan whose request is gone frees nothing before its report."""
    layer, pool, kv = make_holes()
    plan_one(layer, kv)
    layer.forget("a")
    pool.release("a")
    assert not layer.reclaim_now()
    assert pool.num_free_blocks() == 31


@pytest.mark.parametrize("early", [False, True])
def test_copy_that_fails_after_its_commit_costs_the_request(early: bool) -> None:
    """Nothing can be rolled back, so the request is named as lost; a resumed one is not."""
    for preempted in (False, True):
        layer, pool, kv = make_holes()
        if early:
            ticket = plan_one(layer, kv).ticket
            layer.reclaim_now()
        else:
            layer.reclaim_now()
            ticket = layer.reclamation.take_urgent()[0].ticket
        if preempted:
            layer.forget("a")
            pool.release("a")
            make_request(layer, pool)
        assert layer.stats.counter("relocations_total", "committed") == 0
        assert layer.settle(ticket, "copy failed") == ([] if preempted else ["a"])
        assert layer.stats.counter("relocations_total", "failed") == 1
        assert layer.stats.counter("relocations_total", "committed") == 0
        assert layer.stats.counter("relocated_tokens_total") == 0
        pool.check_integrity()


@pytest.mark.parametrize("num_free", [0, 4])
def test_urgent_reclaim_fails_without_gain_or_room(num_free: int) -> None:
    """No packing frees a block, or there is no destination: the scheduler must preempt."""
    layer, pool = make_layer(ModelPool(5 + num_free), policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [5] if num_free else HALF)
    assert not layer.reclaim_now()
    assert pool.num_free_blocks() == num_free
    assert layer.reclamation.take_urgent() == []


@pytest.mark.parametrize("orphaned", [False, True])
def test_abandoned_plans_give_every_block_back_at_once(orphaned: bool) -> None:
    """Without waiting for the report, which is still taken, and changes nothing."""
    layer, pool, kv = make_holes()
    ticket = plan_one(layer, kv).ticket
    if orphaned:
        layer.forget("a")
        pool.release("a")
    before = list(pool.lists.get("a", ()))
    layer.abandon_relocations()
    assert layer.reclamation.num_in_flight == layer.reclamation.blocks_in_flight() == 0
    assert list(pool.lists.get("a", ())) == before
    assert kv.plan is None
    pool.check_integrity()
    assert layer.settle(ticket, None) == []
    assert layer.stats.counter("relocations_total", "rolled_back") == 1
    layer.verification.check_all()


def test_abandoned_plan_frees_what_evictions_emptied_meanwhile() -> None:
    """Its sources were spared while it was in flight."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    kill(layer, kv, kv.table.live_ids_in(kv.blocks.ids[plan.source_indices[:1]]).tolist())
    held = kv.num_retained
    layer.abandon_relocations()
    assert kv.num_retained == held - 1
    pool.check_integrity()


@pytest.mark.parametrize("kind", ["never sent", "reported twice", "withdrawn"])
def test_report_of_an_unknown_batch_is_an_error(kind: str) -> None:
    """With the numbers; a batch of a request that ended is not unknown until its report."""
    layer, pool, kv = make_holes()
    plan = plan_one(layer, kv)
    if kind == "withdrawn":
        layer.reclamation.withdraw([plan], layer.requests)
    else:
        layer.forget("a")
        pool.release("a")
        layer.settle(plan.ticket, None)
    ticket = 99 if kind == "never sent" else plan.ticket
    with pytest.raises(PlanError, match=rf"batch {ticket} was reported, outstanding are \[\]"):
        layer.settle(ticket, None)
