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
from vtoken.table_store import GROUP, TableStore
from vtoken.types import BoolArray, IdArray, SlotArray


class TokenTable:
    """Maps logical token ids ``0 … num_tokens - 1`` to ``(block_id, offset)`` with a live bit."""

    __slots__ = ("_row", "_store", "block_size")

    def __init__(self, store: TableStore, row: int) -> None:
        """The table in a row of ``store``, which has memory for its tokens."""
        self.block_size = store.block_size
        self._store = store
        self._row = row

    @property
    def num_tokens(self) -> int:
        """Logical length, dead tokens included."""
        return int(self._store.num_tokens[self._row])

    @property
    def num_live(self) -> int:
        """Live tokens."""
        return int(self._store.num_live[self._row])

    @property
    def _slot(self) -> SlotArray:
        slots: SlotArray = self._store.slot[self._store.tokens_of(self._row)]
        return slots

    @property
    def _live(self) -> BoolArray:
        live: BoolArray = self._store.live[self._store.tokens_of(self._row)]
        return live

    # -- the three mutations ---------------------------------------------------------------

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
        if not needed:
            return
        store, row = self._store, self._row
        store.reserve(row, first + needed)
        spread = block_ids[:needed, None] * np.int32(size) + np.arange(size, dtype=np.int32)
        skipped = start - first * size
        store.num_tokens[row] = total_tokens
        store.num_live[row] += total_tokens - start
        self._slot[start:] = spread.reshape(-1)[skipped : skipped + total_tokens - start]
        self._live[start:] = True
        self._count_in_groups(start, total_tokens)

    def _count_in_groups(self, start: int, end: int) -> None:
        """New tokens ``start … end - 1`` are live in their groups."""
        first = self._store.tokens_of(self._row).start // GROUP
        groups = np.arange(start // GROUP, (end - 1) // GROUP + 1)
        added = np.minimum((groups + 1) * GROUP, end) - np.maximum(groups * GROUP, start)
        self._store.group_live[first + groups] += added.astype(np.int32)

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
        ids: IdArray = self._live[:before].nonzero()[0]
        return ids

    def num_live_from(self, start: int) -> int:
        """Live tokens from ``start`` on: those in flight, of which some may have gone early."""
        return int(np.count_nonzero(self._live[start:]))

    def slots_of(self, token_ids: IdArray) -> SlotArray:
        """Slots of the given tokens (Eq. 2), live or dead; ``[n]`` int32."""
        slots: SlotArray = self._slot.take(token_ids)
        return slots

    def live_slots(self, before: int | None = None) -> SlotArray:
        """Slots of the live tokens below ``before`` (default: all) in logical order: what attention
        reads; ``[num_live]``."""
        return self.slots_of(self.live_ids(before))

    def blocks_of(self, token_ids: IdArray) -> NDArray[np.int32]:
        """Block ids of the given tokens, live or dead; ``[n]``."""
        blocks: NDArray[np.int32] = self._slot[token_ids] // self.block_size
        return blocks

    def live_ids_in(self, block_ids: NDArray[np.int32]) -> IdArray:
        """Ids of live tokens in any of a few blocks, ascending; ``[n]``.

        One pass for each distinct block, without sorting.
        """
        held_by = self._slot // self.block_size
        found = np.zeros(len(held_by), np.bool_)
        for block_id in set(block_ids.tolist()):
            found |= held_by == block_id
        found &= self._live
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


def _ascends(values: NDArray[np.signedinteger]) -> bool:
    return int(np.count_nonzero(values[1:] > values[:-1])) == len(values) - 1


def _all_distinct(values: NDArray[np.signedinteger]) -> bool:
    """Whether no value repeats; quick where they ascend, as victims and moves do."""
    return _ascends(values) or len(np.unique(values)) == len(values)
