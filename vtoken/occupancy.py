"""How full the blocks are: ``n_b`` per held block and the waste ratio F (Eq. 1), kept
incrementally (paper §3.3, stage 1: no scan of any table).

A block that several requests share through the prefix cache counts once for each holder: a
request's retained blocks are what *it* keeps from going back to the pool. Without sharing this
is Eq. (1) to the letter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import TokenTableError
from vtoken.table_store import GROUP, NOBODY, TableStore
from vtoken.types import IdArray

GIVEN_BACK = 0
"""Block id in a place whose block went back to the pool (vLLM's null block)."""

_Index = NDArray[np.int64]


class BlockOccupancy:
    """Totals over all held blocks of all requests, and the tables that they are counted in."""

    def __init__(self, num_pool_blocks: int, block_size: int) -> None:
        """Start with no block held.

        Args:
            num_pool_blocks: ids of the pool are ``0 … num_pool_blocks - 1``; 0 is the null block.
            block_size: slots per block (S).
        """
        self.block_size = block_size
        self.store = TableStore(block_size, num_pool_blocks)
        self.live_tokens = 0
        self.retained_blocks = 0
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
        low = int(self.blocks_by_live_tokens()[: self.block_size // 2 + 1].sum())
        return low / self.retained_blocks if self.retained_blocks else 0.0

    def blocks_by_live_tokens(self) -> NDArray[np.int64]:
        """``[S + 1]``: how many held blocks have 0, 1, … S live tokens; looks at each of them."""
        held = self.store.block_live[self.store.block_id != GIVEN_BACK]
        return np.bincount(held, minlength=self.block_size + 1)

    def blocks_by_utilization(self, num_ranges: int) -> NDArray[np.int64]:
        """How many held blocks have u_b in ``(i / num_ranges, (i + 1) / num_ranges]``, by ``i``.

        Empty blocks count with the first range. ``[num_ranges]``; looks at each block.
        """
        live = np.arange(self.block_size + 1)
        where = np.maximum(0, -(-live * num_ranges // self.block_size) - 1)
        counts = np.bincount(where, self.blocks_by_live_tokens(), num_ranges)
        blocks: NDArray[np.int64] = counts.astype(np.int64)
        return blocks

    def new_request(self) -> RequestBlocks:
        """Occupancy of one more request, with no block yet, in a new row of the store."""
        return RequestBlocks(self, self.store.add_row())

    # -- many requests at once -------------------------------------------------------------

    def add_one_block(self, rows: _Index, block_ids: NDArray[np.int32]) -> None:
        """Append one newly allocated block to each of these requests; ``[n]`` each."""
        store = self.store
        places = store.num_places[rows]
        for i in (places >= store.num_reserved[rows]).nonzero()[0].tolist():
            store.reserve(int(rows[i]), int(places[i]) + 1)
        at = store.first_block[rows] + places
        store.block_id[at] = block_ids
        store.block_live[at] = 0
        store.num_places[rows] += 1
        store.num_retained[rows] += 1
        self._index_of_block[block_ids] = places
        self.retained_blocks += len(rows)

    def add_one_token(self, rows: _Index, token_ids: IdArray) -> None:
        """Each of these requests has one more token, where its block list puts it; ``[n]`` each.

        Args:
            rows: requests.
            token_ids: the new tokens: their present lengths.
        """
        store, size = self.store, self.block_size
        at = store.first_block[rows] * size + token_ids
        block, offset = np.divmod(at, size)
        store.slot[at] = store.block_id[block] * size + offset
        store.live[at] = True
        store.block_live[block] += 1
        store.group_live[at // GROUP] += 1
        store.num_tokens[rows] = token_ids + 1
        store.num_live[rows] += 1
        self.live_tokens += len(rows)

    def remove_tokens(
        self, rows: _Index, counts: _Index, block_ids: NDArray[np.int32]
    ) -> tuple[_Index, _Index]:
        """Count one live token less in the block of each entry.

        Args:
            rows, counts: requests, and how many entries each has; ``[n]``.
            block_ids: one request after the other, blocks may repeat; ``[counts.sum()]``.

        Returns:
            Where blocks were left without live token: index of the request, and place; ``[m]``
            each, ascending.
        """
        store = self.store
        first = store.first_block[rows]
        at = first.repeat(counts) + self._index_of_block[block_ids]
        np.subtract.at(store.block_live, at, np.int32(1))
        self.live_tokens -= len(block_ids)
        if np.count_nonzero(store.block_live[at]) == len(at):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        empty = np.unique(at[store.block_live[at] == 0])
        beyond = empty[:, None] - first
        inside = (beyond >= 0) & (beyond < store.num_places[rows])
        whose, which = inside.T.nonzero()
        return whose, beyond[which, whose]


class RequestBlocks:
    """One request's mirror of its vLLM block list, with live tokens per block.

    ``ids[i]`` is the block at list index ``i`` or :data:`GIVEN_BACK`; ``num_live[i]`` its
    ``n_b``. The length never shrinks, as in vLLM, so that positions stay logical.

    Attributes:
        row: of the store.
    """

    __slots__ = ("_pool", "_store", "row")

    def __init__(self, pool: BlockOccupancy, row: int) -> None:
        self._pool = pool
        self._store = pool.store
        self.row = row

    @property
    def length(self) -> int:
        """Places of the block list."""
        return int(self._store.num_places[self.row])

    @property
    def retained(self) -> int:
        """Blocks held."""
        return int(self._store.num_retained[self.row])

    @property
    def ids(self) -> NDArray[np.int32]:
        """``[length]`` block ids, a view."""
        return self._store.block_id[self._store.places_of(self.row)]

    @property
    def num_live(self) -> NDArray[np.int32]:
        """``[length]`` live tokens per block (n_b), a view."""
        return self._store.block_live[self._store.places_of(self.row)]

    def extend(self, block_ids: NDArray[np.int32]) -> None:
        """Append newly allocated blocks, still without live tokens."""
        start, end = self.length, self.length + len(block_ids)
        self._store.reserve(self.row, end)
        self._store.num_places[self.row] = end
        self._store.num_retained[self.row] += len(block_ids)
        self.ids[start:] = block_ids
        self._pool._index_of_block[block_ids] = np.arange(start, end)
        self._pool.retained_blocks += len(block_ids)

    def add_tokens(self, start: int, end: int) -> None:
        """Count tokens at list positions ``start … end - 1`` (slots of the list) as live."""
        size = self._pool.block_size
        touched = np.arange(start // size, (end - 1) // size + 1)
        edges = touched * size
        added = np.minimum(edges + size, end) - np.maximum(edges, start)
        self.num_live[touched] += added.astype(np.int32)
        self._pool.live_tokens += end - start

    def give_back(self, indices: _Index) -> NDArray[np.int32]:
        """Empty places: their blocks are no longer held. Returns the block ids ``[n]``.

        Raises:
            TokenTableError: a block still has live tokens, or a place is already empty.
        """
        ids: NDArray[np.int32] = self.ids[indices]
        if (ids == GIVEN_BACK).any() or self.num_live[indices].any():
            raise TokenTableError(
                f"places {indices.tolist()} hold blocks {ids.tolist()} with "
                f"{self.num_live[indices].tolist()} live tokens, cannot give them back"
            )
        self._pool.retained_blocks -= len(ids)
        self._store.num_retained[self.row] -= len(ids)
        self.ids[indices] = GIVEN_BACK
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
        self._pool.live_tokens += int(dst_live.sum()) - int(self.num_live[sources].sum())
        self.num_live[sources] = 0
        self.ids[sources[:d]] = dst_ids
        self._pool._index_of_block[dst_ids] = sources[:d]
        self.num_live[sources[:d]] = dst_live
        self.give_back(sources[d:])

    def clear(self) -> None:
        """The request is gone: take its blocks and tokens out of the totals, and leave the row."""
        if self.row == NOBODY:
            return
        held = np.flatnonzero(self.ids != GIVEN_BACK)
        self._pool.live_tokens -= int(self.num_live[held].sum())
        self.num_live[held] = 0
        self.give_back(held)
        self._store.release_row(self.row)
        self.row = NOBODY  # whoever still looks at it sees nothing
