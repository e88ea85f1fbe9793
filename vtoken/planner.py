"""Relocation planning (paper §3.3, stage 3): pure functions from a snapshot to a plan.

No torch, no clock, no logger, no I/O. Which blocks may move at all (private, closed, in no
other plan) is part of the snapshot; whether moving them pays is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.types import BoolArray, IdArray, RelocationMoves, SlotArray


@dataclass(frozen=True, eq=False)
class BlockSnapshot:
    """Block state of one request at one moment.

    Attributes:
        num_live: ``[num_blocks]`` live tokens per block of the block list.
        eligible: ``[num_blocks]`` whether the block may be a source.
        block_size: slots per block (S).
    """

    num_live: NDArray[np.int32]
    eligible: BoolArray
    block_size: int


@dataclass(frozen=True, eq=False)
class SourceChoice:
    """Blocks worth emptying: list indices, ascending, and how many blocks they pack into."""

    indices: NDArray[np.int64]
    num_destinations: int

    @property
    def num_freed(self) -> int:
        """Blocks gained once sources are given back; at least 1."""
        return len(self.indices) - self.num_destinations


@dataclass(frozen=True)
class Rejection:
    """No plan, and why: a member of :data:`vtoken.stats.SKIP_REASONS`."""

    reason: str


def choose_sources(
    snapshot: BlockSnapshot, max_sources: int, max_destinations: int
) -> SourceChoice | Rejection:
    """Pick the emptiest eligible blocks whose packing frees the most blocks.

    Candidates are taken by rising ``u_b`` (ties: earlier block first), at most ``max_sources``
    (B). Of the prefixes of that order which fit ``max_destinations``, the one with the largest
    gain ``k − ⌈T_live / S⌉`` wins, and of equals the shortest, since it copies least.

    Returns:
        A choice with gain >= 1, else ``no_gain`` (packing frees nothing) or ``no_headroom``
        (it would, with more destination blocks).
    """
    candidates = np.flatnonzero(snapshot.eligible)
    order = np.argsort(snapshot.num_live[candidates], kind="stable")[:max_sources]
    if not len(order):
        return Rejection("no_gain")
    needed = -(-np.cumsum(snapshot.num_live[candidates[order]]) // snapshot.block_size)
    gain = np.arange(1, len(order) + 1) - needed
    if gain.max() < 1:
        return Rejection("no_gain")
    gain[needed > max_destinations] = 0
    best = int(np.argmax(gain))
    if gain[best] < 1:
        return Rejection("no_headroom")
    return SourceChoice(np.sort(candidates[order[: best + 1]]), int(needed[best]))


def build_moves(
    live_ids: IdArray,
    live_slots: SlotArray,
    source_blocks: NDArray[np.int32],
    dst_blocks: NDArray[np.int32],
    block_size: int,
) -> RelocationMoves:
    """Assign the live tokens of the sources to the destinations, in logical order, gap-free.

    Args:
        live_ids, live_slots: ``[num_live]`` all live tokens of the request, logical order.
        source_blocks: ids of the blocks to empty.
        dst_blocks: ids of the blocks to fill, in order of filling.
        block_size: slots per block (S).

    Returns:
        Moves by rising token id; destination ``i`` is slot ``i`` of the concatenated
        ``dst_blocks``, so each is full before the next begins.
    """
    chosen = np.isin(live_slots // block_size, source_blocks)
    ids, src = live_ids[chosen], live_slots[chosen]
    spread = dst_blocks[:, None] * np.int32(block_size) + np.arange(block_size, dtype=np.int32)
    dst: SlotArray = spread.reshape(-1)[: len(ids)].astype(np.int32)
    return RelocationMoves(ids, src, dst)
