"""The checks of I1, I2, I4: each passes on a right state and fails on a hand-made violation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.core_models import ModelPool, kill, make_layer, make_request
from vtoken import invariants
from vtoken.errors import InvariantViolationError
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.token_layer import TokenLayer
from vtoken.types import RelocationMoves

VICTIMS = [token for token in range(1, 16) if token % 4 > 1]  # leaves 2 in each closed block


def make_planned() -> tuple[TokenLayer, ModelPool, RequestKV, RelocationPlan]:
    """A request of 17 tokens in 5 blocks and its plan: 4 sources of 2 into 2 destinations."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, VICTIMS)
    (plan,) = layer.plan_relocations([(kv, 17)])
    assert (len(plan.source_indices), len(plan.dst_blocks)) == (4, 2)
    return layer, pool, kv, plan


def test_right_state_passes_every_check() -> None:
    """No false alarm before, during and after a relocation."""
    layer, _, kv, plan = make_planned()
    invariants.check_plan(kv, plan, 17)
    layer.verification.check_all()
    layer.settle(plan.ticket, None)
    layer.verification.check_all()
    invariants.check_conservation("a", 8, "digest", "digest")


def test_i1_shows_both_digests() -> None:
    """A byte changed: the error has request, number of tokens and both digests."""
    with pytest.raises(InvariantViolationError, match="8 tokens, digest abc became abd") as caught:
        invariants.check_conservation("a", 8, "abc", "abd")
    assert caught.value.invariant == "I1"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: row[:-1], "read 8 slots, the table has 9 live tokens; .* at live token 8"),
        (lambda row: row[[1, 0, *range(2, 9)]], "first difference at live token 0"),
    ],
)
def test_i2_compares_what_attention_read(
    damage: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    """A row that lacks a token or has two swapped is found, the table's own row passes."""
    _, _, kv, _ = make_planned()
    row = kv.table.live_slots()
    invariants.check_row("a", row, row)
    with pytest.raises(InvariantViolationError, match=message):
        invariants.check_row("a", row, damage(row))


def _two_tokens_on_one_slot(kv: RequestKV) -> None:
    kv.table._slot[5] = kv.table._slot[4]


def _token_in_foreign_block(kv: RequestKV) -> None:
    kv.table._slot[5] = 31 * kv.block_size + 1


def _token_in_null_block(kv: RequestKV) -> None:
    kv.table._slot[5] = 1


def _wrong_live_counter(kv: RequestKV) -> None:
    kv.store.num_live[kv.row] += 1


def _wrong_block_count(kv: RequestKV) -> None:
    kv.blocks.num_live[1] = 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_two_tokens_on_one_slot, "9 live tokens on 8 slots"),
        (_token_in_foreign_block, "live token in block 31"),
        (_token_in_null_block, "live token in block 0"),
        (_wrong_live_counter, "9 live bits, counter says 10"),
        (_wrong_block_count, "block 2 has 2 live tokens, occupancy says 3"),
    ],
)
def test_i2_names_expected_and_actual(damage: Callable[[RequestKV], None], message: str) -> None:
    """Each way to break the mapping is found, with the numbers."""
    layer, _, kv, _ = make_planned()
    damage(kv)
    with pytest.raises(InvariantViolationError, match=message) as caught:
        layer.verification.check_all()
    assert caught.value.invariant == "I2"
    assert "request a" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("live_tokens", r"expected 9 live tokens in 5 blocks, have \(10, 5, 9, 5\)"),
        ("retained_blocks", r"expected 9 live tokens in 5 blocks, have \(9, 6, 9, 5\)"),
    ],
)
def test_totals_name_expected_and_actual(field: str, message: str) -> None:
    """An incremental total that drifted from Eq. (1) is found."""
    layer, _, _, _ = make_planned()
    setattr(layer.occupancy, field, getattr(layer.occupancy, field) + 1)
    with pytest.raises(InvariantViolationError, match=message):
        layer.verification.check_all()


def test_totals_find_a_stray_block() -> None:
    """A block that no request holds is found."""
    layer, _, _, _ = make_planned()
    layer.occupancy.store.block_live[-1] += 1
    layer.occupancy.store.block_id[-1] = 1
    with pytest.raises(InvariantViolationError, match=r"have \(9, 5, 10, 6\)"):
        layer.verification.check_all()


def with_moves(
    plan: RelocationPlan,
    token_ids: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    src: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    dst: Callable[[np.ndarray], np.ndarray] = lambda a: a,
) -> RelocationPlan:
    """The plan with some of its move arrays changed."""
    moves = plan.moves
    changed = RelocationMoves(
        token_ids(moves.token_ids), src(moves.src_slots), dst(moves.dst_slots)
    )
    return RelocationPlan(plan.req_id, plan.source_indices, plan.dst_blocks, changed)


def _frees_nothing(plan: RelocationPlan) -> RelocationPlan:
    dst = np.arange(20, 24, dtype=np.int32)
    return RelocationPlan(plan.req_id, plan.source_indices, dst, plan.moves)


def _moves_the_tail(plan: RelocationPlan) -> RelocationPlan:
    return RelocationPlan(plan.req_id, np.array([0, 1, 2, 4]), plan.dst_blocks, plan.moves)


def _leaves_a_token(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, lambda a: a[1:], lambda a: a[1:], lambda a: a[1:])


def _moves_a_foreign_token(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, src=lambda a: np.append(a[:-1], np.int32(99)))


def _moves_another_token(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, lambda a: np.append(a[:-1], 16))


def _out_of_order(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, lambda a: a[::-1], lambda a: a[::-1])


def _two_on_one_slot(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, dst=lambda a: np.append(a[:-1], a[0]))


def _leaves_a_gap(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, dst=lambda a: np.append(a[:-1], a[-1] + 8))


def _permutes_destinations(plan: RelocationPlan) -> RelocationPlan:
    return with_moves(plan, dst=lambda a: a[::-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_frees_nothing, "4 sources, 4 targets"),
        (_moves_the_tail, "block at index 4 moves, only 4 are closed"),
        (_leaves_a_token, "sources hold 8 live tokens, plan moves 7"),
        (_moves_a_foreign_token, "sources hold 8 live tokens, plan moves 8"),
        (_moves_another_token, "token 16 is at slot"),
        (_out_of_order, "not in logical order"),
        (_two_on_one_slot, "8 tokens into 7 slots of 2 blocks"),
        (_leaves_a_gap, "move 7 goes to slot"),
        (_permutes_destinations, "move 0 goes to slot"),
    ],
)
def test_i4_names_expected_and_actual(
    damage: Callable[[RelocationPlan], RelocationPlan], message: str
) -> None:
    """Each way to make a wrong plan is found, with the numbers."""
    _, _, kv, plan = make_planned()
    with pytest.raises(InvariantViolationError, match=message) as caught:
        invariants.check_plan(kv, damage(plan), 17)
    assert caught.value.invariant == "I4"


def test_i4_refuses_a_source_that_was_given_back() -> None:
    """A place without block cannot be emptied: it would be freed twice."""
    _, _, kv, plan = make_planned()
    kv.blocks.ids[2] = 0
    with pytest.raises(InvariantViolationError, match=r"I4.*\[2\]"):
        invariants.check_plan(kv, plan, 17)


@pytest.mark.parametrize(("level", "checked"), [("off", 0), ("sampled", 2), ("full", 32)])
def test_verify_level_decides_how_many_batches_are_checked(level: str, checked: int) -> None:
    """``off`` none, ``sampled`` every 16th ticket, ``full`` all."""
    layer, _ = make_layer(verify=level)
    assert sum(layer.verification.covers(ticket) for ticket in range(1, 33)) == checked


def test_violations_are_counted_and_raised() -> None:
    """The metric rises before the engine stops."""
    layer, _ = make_layer(verify="full")
    layer.verification.check_conservation("a", 8, "abc", "abc")
    with pytest.raises(InvariantViolationError):
        layer.verification.check_conservation("a", 8, "abc", "abd")
    assert layer.stats.counter("invariant_checks_total", "I1") == 2
    assert layer.stats.counter("invariant_violations_total", "I1") == 1
