"""How full the blocks are: ``n_b`` per held block and the waste ratio F (Eq. 1), kept
incrementally (paper §3.3, stage 1: no scan of any table).

A block that several requests share through the prefix cache counts once for each holder: a
request's retained blocks are what *it* keeps from going back to the pool. Without sharing this
is Eq. (1) to the letter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import TokenTableError

GIVEN_BACK = 0
"""Block id in a place whose block went back to the pool (vLLM's null block)."""

_Index = NDArray[np.int64]


class BlockOccupancy:
    """Totals over all held blocks of all requests; O(1) per changed block."""

    def __init__(self, num_pool_blocks: int, block_size: int) -> None:
        """Start with no block held.

        Args:
            num_pool_blocks: ids of the pool are ``0 … num_pool_blocks - 1``; 0 is the null block.
            block_size: slots per block (S).
        """
        self.block_size = block_size
        self.live_tokens = 0
        self.retained_blocks = 0
        self._num_by_live = np.zeros(block_size + 1, np.int64)
        # Where a block stands in its holder's block list. One array serves all requests: blocks
        # are shared only as common prefix, so every holder has them at the same index.
        self._index_of_block = np.zeros(num_pool_blocks, np.int32)

    @property
    def waste_ratio(self) -> float:
        """F = 1 − Σ n_b / (N·S) over held blocks (Eq. 1); 0 when none is held."""
        capacity = self.retained_blocks * self.block_size
        return 1 - self.live_tokens / capacity if capacity else 0.0

    @property
    def low_utilization_block_ratio(self) -> float:
        """Share of held blocks with u_b <= 1/2 (paper Fig. 1)."""
        low = int(self._num_by_live[: self.block_size // 2 + 1].sum())
        return low / self.retained_blocks if self.retained_blocks else 0.0

    def blocks_by_live_tokens(self) -> NDArray[np.int64]:
        """``[S + 1]``: how many held blocks have 0, 1, … S live tokens."""
        return self._num_by_live.copy()

    def blocks_by_utilization(self, num_ranges: int) -> NDArray[np.int64]:
        """How many held blocks have u_b in ``(i / num_ranges, (i + 1) / num_ranges]``, by ``i``.

        Empty blocks count with the first range. ``[num_ranges]``; O(S).
        """
        live = np.arange(self.block_size + 1)
        where = np.maximum(0, -(-live * num_ranges // self.block_size) - 1)
        counts = np.bincount(where, self._num_by_live, num_ranges)
        blocks: NDArray[np.int64] = counts.astype(np.int64)
        return blocks

    def new_request(self) -> RequestBlocks:
        """Occupancy of one more request, with no block yet."""
        return RequestBlocks(self)

    @property
    def may_hold_empty_blocks(self) -> bool:
        """Whether any request holds a block without live token."""
        return bool(self._num_by_live[0])

    def _changed(self, before: NDArray[Any], after: NDArray[Any]) -> None:
        bins = self.block_size + 1
        self._num_by_live += np.bincount(after, minlength=bins)
        self._num_by_live -= np.bincount(before, minlength=bins)


class RequestBlocks:
    """One request's mirror of its vLLM block list, with live tokens per block.

    ``ids[i]`` is the block at list index ``i`` or :data:`GIVEN_BACK`; ``num_live[i]`` its
    ``n_b``. The length never shrinks, as in vLLM, so that positions stay logical.
    """

    __slots__ = ("_ids", "_live", "_pool", "length", "retained")

    def __init__(self, pool: BlockOccupancy) -> None:
        self._pool = pool
        self.length = 0
        self.retained = 0
        self._ids = np.zeros(32, np.int32)
        self._live = np.zeros(32, np.int32)

    @property
    def ids(self) -> NDArray[np.int32]:
        """``[length]`` block ids, a view."""
        return self._ids[: self.length]

    @property
    def num_live(self) -> NDArray[np.int32]:
        """``[length]`` live tokens per block (n_b), a view."""
        return self._live[: self.length]

    def extend(self, block_ids: NDArray[np.int32]) -> None:
        """Append newly allocated blocks, still without live tokens."""
        n = len(block_ids)
        if self.length + n > len(self._ids):
            extra = max(len(self._ids), n)
            self._ids = np.concatenate([self._ids, np.zeros(extra, np.int32)])
            self._live = np.concatenate([self._live, np.zeros(extra, np.int32)])
        end = self.length + n
        self._ids[self.length : end] = block_ids
        self._live[self.length : end] = 0
        self._pool._index_of_block[block_ids] = np.arange(self.length, end)
        self.length = end
        self.retained += n
        self._pool.retained_blocks += n
        self._pool._num_by_live[0] += n

    def add_tokens(self, start: int, end: int) -> None:
        """Count tokens at list positions ``start … end - 1`` (slots of the list) as live."""
        self.announce_tokens(end - start)
        self.place_tokens(start, end)

    def announce_tokens(self, num_tokens: int) -> None:
        """Count tokens in the totals that :meth:`place_tokens` will put into blocks later."""
        self._pool.live_tokens += num_tokens

    def place_tokens(self, start: int, end: int) -> None:
        """Put announced tokens, at list positions ``start … end - 1``, into their blocks."""
        size = self._pool.block_size
        first, last = start // size, (end - 1) // size
        if last - first < 2:  # decode
            middle = min(end, (first + 1) * size)
            self._place(first, middle - start)
            self._place(last, end - middle)
            return
        edges = np.arange(first, last + 1) * size
        added = np.minimum(edges + size, end) - np.maximum(edges, start)
        self._set_live(np.arange(first, last + 1), self._live[first : last + 1] + added)

    def _place(self, index: int, num_tokens: int) -> None:
        before = int(self._live[index])
        self._live[index] = before + num_tokens
        self._pool._num_by_live[before] -= 1
        self._pool._num_by_live[before + num_tokens] += 1

    def remove_tokens(self, block_ids: NDArray[np.int32]) -> None:
        """Count one live token less in the block of each entry (entries may repeat)."""
        counts = np.bincount(self._pool._index_of_block[block_ids])
        touched = counts.nonzero()[0]
        before = self._live[touched]
        after = before - counts[touched]
        self._live[touched] = after
        self._pool._changed(before, after)
        self._pool.live_tokens -= len(block_ids)

    def give_back(self, indices: _Index) -> NDArray[np.int32]:
        """Empty places: their blocks are no longer held. Returns the block ids ``[n]``.

        Raises:
            TokenTableError: a block still has live tokens, or a place is already empty.
        """
        ids: NDArray[np.int32] = self._ids[indices]
        if (ids == GIVEN_BACK).any() or self._live[indices].any():
            raise TokenTableError(
                f"places {indices.tolist()} hold blocks {ids.tolist()} with "
                f"{self._live[indices].tolist()} live tokens, cannot give them back"
            )
        self._pool._num_by_live[0] -= len(ids)
        self._pool.retained_blocks -= len(ids)
        self.retained -= len(ids)
        self._ids[indices] = GIVEN_BACK
        return ids

    def relocate(
        self, sources: _Index, dst_ids: NDArray[np.int32], dst_live: NDArray[np.int32]
    ) -> None:
        """Swap source blocks for fewer destination blocks, which take the first places.

        Args:
            sources: ``[k]`` list indices, ascending.
            dst_ids, dst_live: ``[d]``, ``d < k``; blocks and their live tokens.
        """
        d = len(dst_ids)
        self._pool.live_tokens += int(dst_live.sum()) - int(self._live[sources].sum())
        self._set_live(sources, np.zeros(len(sources), np.int32))
        self._ids[sources[:d]] = dst_ids
        self._pool._index_of_block[dst_ids] = sources[:d]
        self._set_live(sources[:d], dst_live)
        self.give_back(sources[d:])

    def empty_indices(self, end: int) -> _Index:
        """Held places below list index ``end`` whose block has no live token."""
        if not self._pool.may_hold_empty_blocks:
            return np.empty(0, np.int64)
        return np.flatnonzero((self._live[:end] == 0) & (self._ids[:end] != GIVEN_BACK))

    def clear(self) -> None:
        """The request is gone: take all its blocks and tokens out of the totals."""
        held = np.flatnonzero(self.ids != GIVEN_BACK)
        self._pool.live_tokens -= int(self._live[held].sum())
        self._set_live(held, np.zeros(len(held), np.int32))
        self.give_back(held)
        self.length = 0

    def _set_live(self, indices: _Index, values: NDArray[np.int32]) -> None:
        before = self._live[indices]
        self._live[indices] = values
        self._pool._changed(before, self._live[indices])
