"""The invariants of paper §3.5, checked against the real state; violations carry the numbers.

I1  token conservation   a relocation changes neither the live ids nor a byte of their K/V
I2  unique mapping       a live token has one slot, a slot at most one live token
I3  visibility           holds by construction: nothing reads a destination or writes to a source
                         before the copy is complete, early commits included
I4  planning             a plan frees blocks, moves only what it may, never overlaps another
"""

from __future__ import annotations

import numpy as np

from vtoken.errors import InvariantViolationError
from vtoken.occupancy import BlockOccupancy
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.types import SlotArray


def check_conservation(req_id: str, num_tokens: int, before: str, after: str) -> None:
    """I1: digests of the ordered K/V bytes before and after a relocation agree.

    Raises:
        InvariantViolationError: they differ.
    """
    if before != after:
        raise InvariantViolationError(
            "I1", f"request {req_id}: {num_tokens} tokens, digest {before} became {after}"
        )


def check_unique_mapping(kv: RequestKV) -> None:
    """I2: slots of live tokens are distinct and lie in blocks that the request holds, and the
    per-block counts agree with the table.

    Raises:
        InvariantViolationError: with the expected and the actual numbers.
    """
    ids = kv.table.live_ids()
    if len(ids) != kv.table.num_live:
        raise InvariantViolationError(
            "I2", f"request {kv.req_id}: {len(ids)} live bits, counter says {kv.table.num_live}"
        )
    slots = kv.table.slots_of(ids)
    distinct = len(np.unique(slots))
    if distinct != len(slots):
        raise InvariantViolationError(
            "I2", f"request {kv.req_id}: {len(slots)} live tokens on {distinct} slots"
        )
    held = kv.blocks.ids
    expected = _live_per_place(held, slots // kv.table.block_size, kv.req_id)
    if not np.array_equal(expected, kv.blocks.num_live):
        i = int(np.flatnonzero(expected != kv.blocks.num_live)[0])
        raise InvariantViolationError(
            "I2",
            f"request {kv.req_id}: block {held[i]} has {expected[i]} live tokens, "
            f"occupancy says {kv.blocks.num_live[i]}",
        )


def check_row(req_id: str, expected: SlotArray, row: SlotArray) -> None:
    """I2: what attention read (``row``) are the table's live tokens, in logical order.

    Raises:
        InvariantViolationError: with the first difference.
    """
    if np.array_equal(expected, row):
        return
    shorter = min(len(expected), len(row))
    differs = np.flatnonzero(expected[:shorter] != row[:shorter])
    at = int(differs[0]) if len(differs) else shorter
    raise InvariantViolationError(
        "I2",
        f"request {req_id}: attention read {len(row)} slots, the table has {len(expected)} "
        f"live tokens; first difference at live token {at}",
    )


def _live_per_place(held: np.ndarray, block_of_token: np.ndarray, req_id: str) -> np.ndarray:
    places = np.flatnonzero(held)
    order = places[np.argsort(held[places])]
    at = np.searchsorted(held[order], block_of_token)
    known = at < len(order)
    known[known] = held[order][at[known]] == block_of_token[known]
    if not known.all():
        stray = block_of_token[~known][0]
        raise InvariantViolationError("I2", f"request {req_id}: live token in block {stray}")
    return np.bincount(order[at], minlength=len(held))


def check_plan(kv: RequestKV, plan: RelocationPlan, num_computed: int) -> None:
    """I4: the plan frees at least one block, empties held closed blocks, and moves exactly
    their live tokens in logical order to gap-free destinations.

    Raises:
        InvariantViolationError: with the expected and the actual numbers.
    """
    size = kv.table.block_size
    num_sources, num_dst = len(plan.source_indices), len(plan.dst_blocks)
    if num_dst >= num_sources:
        raise _plan_violation(kv, f"{num_sources} sources, {num_dst} targets")
    if plan.source_indices.max() >= num_computed // size:
        raise _plan_violation(
            kv,
            f"block at index {plan.source_indices.max()} moves, "
            f"only {num_computed // size} are closed",
        )
    sources = kv.blocks.ids[plan.source_indices]
    if not sources.all():
        empty = plan.source_indices[sources == 0].tolist()
        raise _plan_violation(kv, f"no block at indices {empty}")
    live = int(kv.blocks.num_live[plan.source_indices].sum())
    moved = np.isin(plan.moves.src_slots // size, sources).sum()
    if not live == moved == plan.moves.num_moves:
        raise _plan_violation(
            kv, f"sources hold {live} live tokens, plan moves {plan.moves.num_moves}"
        )
    _check_moves(kv, plan)


def _check_moves(kv: RequestKV, plan: RelocationPlan) -> None:
    size, moves, num_dst = kv.table.block_size, plan.moves, len(plan.dst_blocks)
    if (np.diff(moves.token_ids) <= 0).any():
        raise _plan_violation(kv, "moves are not in logical order")
    at = kv.table.slots_of(moves.token_ids)
    if (i := _first_difference(at, moves.src_slots)) is not None:
        token = moves.token_ids[i]
        raise _plan_violation(
            kv, f"token {token} is at slot {at[i]}, plan says {moves.src_slots[i]}"
        )
    filled = len(np.unique(moves.dst_slots))
    if filled != moves.num_moves or -(-moves.num_moves // size) != num_dst:
        raise _plan_violation(
            kv, f"{moves.num_moves} tokens into {filled} slots of {num_dst} blocks"
        )
    gap_free = (plan.dst_blocks[:, None] * size + np.arange(size)).reshape(-1)[: moves.num_moves]
    if (i := _first_difference(gap_free, moves.dst_slots)) is not None:
        raise _plan_violation(
            kv, f"move {i} goes to slot {moves.dst_slots[i]}, the next free one is {gap_free[i]}"
        )


def _first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    differ = np.flatnonzero(a != b)
    return int(differ[0]) if len(differ) else None


def _plan_violation(kv: RequestKV, message: str) -> InvariantViolationError:
    return InvariantViolationError("I4", f"request {kv.req_id}: {message}")


def check_totals(occupancy: BlockOccupancy, requests: list[RequestKV]) -> None:
    """The incremental totals equal Eq. (1) computed from scratch.

    Raises:
        InvariantViolationError: (as I2) with the expected and the actual numbers.
    """
    live = sum(kv.table.num_live for kv in requests)
    retained = sum(int((kv.blocks.ids != 0).sum()) for kv in requests)
    by_live = occupancy.blocks_by_live_tokens()
    from_histogram = int((by_live * np.arange(len(by_live))).sum())
    actual = (occupancy.live_tokens, occupancy.retained_blocks, from_histogram, int(by_live.sum()))
    if actual != (live, retained, live, retained):
        raise InvariantViolationError(
            "I2", f"totals: expected {live} live tokens in {retained} blocks, have {actual}"
        )
