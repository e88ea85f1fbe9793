"""The token table of one request (paper §3.2): logical token → physical slot, and liveness.

Stands between policies, which name logical tokens, and the pool, which knows blocks. Exactly
three operations mutate it; everything else reads:

    evict_tokens      a policy's decision: metadata only, nothing is moved or freed
    sync_new_tokens   the request grew: new tokens sit where vLLM's block list puts them
    apply_moves       a relocation was copied: tokens change place, all or none

Memory is O(L): 4 bytes for the slot and 1 for the live bit of each token, whatever the model
(80 KiB at 16 K tokens). Slots are kept whole, not as block and offset: a row is then one gather.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import PlanError, TokenTableError
from vtoken.types import IdArray, SlotArray

_INITIAL_CAPACITY = 256


class TokenTable:
    """Maps logical token ids ``0 … num_tokens - 1`` to ``(block_id, offset)`` with a live bit."""

    __slots__ = ("_live", "_slot", "block_size", "num_live", "num_tokens")

    def __init__(self, block_size: int) -> None:
        """Start empty.

        Args:
            block_size: slots per block, 1 … 32767.
        """
        self.block_size = block_size
        self.num_tokens = 0
        self.num_live = 0
        self._slot = np.zeros(0, np.int32)
        self._live = np.zeros(0, np.bool_)
        self._grow(_INITIAL_CAPACITY)

    # -- the three mutations ---------------------------------------------------------------

    def evict_tokens(self, token_ids: IdArray) -> NDArray[np.int32]:
        """Mark tokens dead; attention stops reading them with the next row.

        Args:
            token_ids: ``[n]`` distinct live ids.

        Returns:
            ``[n]`` the block of each evicted token.

        Raises:
            TokenTableError: an id is unknown, dead or repeated; nothing was changed.
        """
        ids = np.asarray(token_ids, np.int64)
        self._require_live(ids)
        if not _all_distinct(ids):
            raise TokenTableError(f"{len(ids)} ids to evict, only {len(np.unique(ids))} distinct")
        self._live[ids] = False
        self.num_live -= len(ids)
        return self.blocks_of(ids)

    def sync_new_tokens(self, block_ids: NDArray[np.int32], total_tokens: int) -> None:
        """Register tokens ``num_tokens … total_tokens - 1`` as live, where their block puts them.

        Args:
            block_ids: blocks that hold the new tokens, in order, starting with the block of
                token ``num_tokens`` (list index ``num_tokens // block_size``).
            total_tokens: length of the request from now on.

        Raises:
            TokenTableError: the request would shrink, or ``block_ids`` do not cover it.
        """
        start, size = self.num_tokens, self.block_size
        first = start // size
        needed = (total_tokens - 1) // size - first + 1 if total_tokens > start else 0
        if total_tokens < start or len(block_ids) < needed:
            raise TokenTableError(
                f"sync from {start} to {total_tokens} tokens needs {needed} blocks of {size}, "
                f"got {len(block_ids)}"
            )
        if total_tokens > len(self._live):
            self._grow(total_tokens)
        if needed == 1:  # decode
            shift = (int(block_ids[0]) - first) * size
            self._slot[start:total_tokens] = np.arange(start + shift, total_tokens + shift)
        elif needed:
            spread = block_ids[:needed, None] * np.int32(size) + np.arange(size, dtype=np.int32)
            skipped = start - first * size
            placed = spread.reshape(-1)[skipped : skipped + total_tokens - start]
            self._slot[start:total_tokens] = placed
        self._live[start:total_tokens] = True
        self.num_live += total_tokens - start
        self.num_tokens = total_tokens

    def apply_moves(self, token_ids: IdArray, src_slots: SlotArray, dst_slots: SlotArray) -> None:
        """Point tokens at their copies: source cleared and destination set in one step.

        Args:
            token_ids, src_slots, dst_slots: ``[n]`` each; ids live and distinct.

        Raises:
            PlanError: a token is dead, repeated or not at its source, a destination repeats,
                or is held by another live token of this request; nothing was changed.
        """
        if not len(token_ids) == len(src_slots) == len(dst_slots):
            raise PlanError(
                f"{len(token_ids)} tokens, {len(src_slots)} sources, {len(dst_slots)} destinations"
            )
        try:
            self._require_live(token_ids)
        except TokenTableError as error:
            raise PlanError(f"cannot move: {error}") from error
        at = self.slots_of(token_ids)
        if not np.array_equal(at, src_slots):
            i = int(np.flatnonzero(at != src_slots)[0])
            raise PlanError(f"token {token_ids[i]} is at slot {at[i]}, plan says {src_slots[i]}")
        if not _all_distinct(token_ids):
            raise PlanError(
                f"{len(token_ids)} moves of {len(np.unique(token_ids))} distinct tokens"
            )
        if not _all_distinct(dst_slots):
            raise PlanError(f"{len(dst_slots)} moves to {len(np.unique(dst_slots))} distinct slots")
        dst_blocks = dst_slots // self.block_size
        clash = np.intersect1d(self._held_beside(token_ids, dst_blocks), dst_slots)
        if len(clash):
            raise PlanError(f"destination slot {clash[0]} is held by a live token")
        self._slot[token_ids] = dst_slots

    # -- reads -----------------------------------------------------------------------------

    def live_ids(self, before: int | None = None) -> IdArray:
        """Ids of live tokens below ``before`` (default: all), ascending; ``[num_live]``."""
        end = self.num_tokens if before is None else min(before, self.num_tokens)
        ids: IdArray = self._live[:end].nonzero()[0]
        return ids

    def slots_of(self, token_ids: IdArray) -> SlotArray:
        """Slots of the given tokens (Eq. 2), live or dead; ``[n]`` int32."""
        slots: SlotArray = self._slot.take(token_ids)
        return slots

    def live_slots(self) -> SlotArray:
        """Slots of all live tokens in logical order: what attention reads; ``[num_live]``."""
        return self.slots_of(self.live_ids())

    def blocks_of(self, token_ids: IdArray) -> NDArray[np.int32]:
        """Block ids of the given tokens, live or dead; ``[n]``."""
        blocks: NDArray[np.int32] = self._slot[token_ids] // self.block_size
        return blocks

    def live_ids_in(self, block_ids: NDArray[np.int32]) -> IdArray:
        """Ids of live tokens in any of a few blocks, ascending; ``[n]``.

        One pass for each distinct block, without sorting.
        """
        held_by = self._slot[: self.num_tokens] // self.block_size
        found = np.zeros(self.num_tokens, np.bool_)
        for block_id in set(block_ids.tolist()):
            found |= held_by == block_id
        found &= self._live[: self.num_tokens]
        ids: IdArray = found.nonzero()[0]
        return ids

    def is_live(self, token_ids: IdArray) -> NDArray[np.bool_]:
        """Live bit of each given token; ``[n]``."""
        live: NDArray[np.bool_] = self._live[token_ids]
        return live

    def _require_live(self, token_ids: IdArray) -> None:
        if not len(token_ids):
            return
        if _ascends(token_ids):
            low, high = int(token_ids[0]), int(token_ids[-1])
        else:
            low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.num_tokens:
            raise TokenTableError(f"ids {low} … {high} outside 0 … {self.num_tokens - 1}")
        live = self._live[token_ids]
        if np.count_nonzero(live) < len(live):
            raise TokenTableError(f"token {token_ids[np.flatnonzero(~live)[0]]} is already dead")

    def _held_beside(self, token_ids: IdArray, block_ids: NDArray[np.int32]) -> SlotArray:
        """Slots of live tokens in ``block_ids``, those of ``token_ids`` left out."""
        beside = self.live_ids_in(block_ids)
        if len(beside):
            beside = np.setdiff1d(beside, token_ids, assume_unique=True)
        return self.slots_of(beside)

    def _grow(self, needed: int) -> None:
        old = len(self._live)
        new = max(2 * old, needed)
        self._slot = np.concatenate([self._slot, np.zeros(new - old, np.int32)])
        self._live = np.concatenate([self._live, np.zeros(new - old, np.bool_)])


def _ascends(values: NDArray[np.signedinteger]) -> bool:
    return int(np.count_nonzero(values[1:] > values[:-1])) == len(values) - 1


def _all_distinct(values: NDArray[np.signedinteger]) -> bool:
    """Whether no value repeats; quick where they ascend, as victims and moves do."""
    return _ascends(values) or len(np.unique(values)) == len(values)
