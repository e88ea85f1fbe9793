"""One piece of memory for the tables of all requests, so that a step works on all at once.

Every request has a *row* of numbers and a *region* of blocks. Block ``i`` of a region describes
place ``i`` of the request's block list, and beside it are the request's tokens ``i * S …``. The
live tokens of each :data:`GROUP` of neighbours are counted, so that the k-th live token is found
without reading all of them::

    row       first_block ──┐      num_tokens, num_live, num_places, …
    block     id, live      ▼ b₀ b₁ b₂ …            S tokens each
    token     slot, live      t₀ t₁ t₂ …
    group     live            g₀ g₁ …               64 tokens each

Regions are powers of two of :data:`REGION_BLOCKS` blocks and come from a buddy allocator; what is
outside of the tokens that a request has is zero. The arrays are replaced when they grow: hold no
view across a call that reserves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import TokenTableError
from vtoken.types import IdArray, SlotArray

GROUP = 64
"""Tokens that are counted together."""

REGION_BLOCKS = GROUP
"""Blocks of the smallest region: whole groups, whatever the block size."""

NOBODY = 0
"""Row of no request: empty, never due."""

NEVER = np.iinfo(np.int64).max
"""``next_evict_at`` of rows that no request has."""

_ROW_FIELDS = (
    "first_block",
    "num_reserved",
    "num_places",
    "num_retained",
    "num_tokens",
    "num_live",
    "next_evict_at",
    "row_changed",
)
_REGION_FIELDS = ("block_id", "block_live", "group_live", "slot", "live")


class TableStore:
    """Arrays of all requests.

    Attributes:
        first_block, num_reserved: where a row's region begins, and its blocks; int64 ``[rows]``.
        num_places, num_retained: length of its block list, and the blocks that it still holds.
        num_tokens, num_live: its logical length, and its live tokens.
        next_evict_at: logical length at which its next eviction is due.
        row_changed: whether the worker's row of it is not what the worker makes of it.
        block_id, block_live: int32 ``[blocks]``: id of the block (0: given back) and its n_b.
        group_live: int32 ``[tokens / GROUP]`` live tokens.
        slot, live: int32 and bool ``[tokens]``.
    """

    first_block: NDArray[np.int64]
    num_reserved: NDArray[np.int64]
    num_places: NDArray[np.int64]
    num_retained: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_live: NDArray[np.int64]
    next_evict_at: NDArray[np.int64]
    row_changed: NDArray[np.int64]

    def __init__(self, block_size: int, num_blocks: int = 0) -> None:
        """Start with no request.

        Args:
            block_size: slots per block (S).
            num_blocks: expected; more are made room for when they come.
        """
        self.block_size = block_size
        regions = _power_of_two(-(-num_blocks // REGION_BLOCKS))
        num_tokens = regions * REGION_BLOCKS * block_size
        self.block_id = np.zeros(regions * REGION_BLOCKS, np.int32)
        self.block_live = np.zeros(regions * REGION_BLOCKS, np.int32)
        self.group_live = np.zeros(num_tokens // GROUP, np.int32)
        self.slot = np.zeros(num_tokens, np.int32)
        self.live = np.zeros(num_tokens, np.bool_)
        self._num_regions = regions
        self._free = {regions: {0}}  # size of a region: where free ones of it begin
        for name in _ROW_FIELDS:
            setattr(self, name, np.zeros(1, np.int64))
        self.next_evict_at[NOBODY] = NEVER
        self._free_rows: list[int] = []

    def add_row(self) -> int:
        """A row for one more request, with a small region."""
        if not self._free_rows:
            rows = len(self.first_block)
            for name in _ROW_FIELDS:
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(rows, np.int64)]))
            self.next_evict_at[rows:] = NEVER
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        for name in _ROW_FIELDS:
            getattr(self, name)[row] = 0
        self._place(row, 1)
        return row

    def release_row(self, row: int) -> None:
        """The request is gone: its row and its region are somebody else's from now on."""
        first, blocks = int(self.first_block[row]), int(self.num_reserved[row])
        self._release(first, blocks)
        for name in _ROW_FIELDS:
            getattr(self, name)[row] = 0
        self.next_evict_at[row] = NEVER
        self._free_rows.append(row)

    def reserve(self, row: int, num_blocks: int) -> None:
        """Have the row's region hold this many blocks at least."""
        if num_blocks <= self.num_reserved[row]:
            return
        old, blocks = int(self.first_block[row]), int(self.num_reserved[row])
        self._place(row, _power_of_two(-(-num_blocks // REGION_BLOCKS)))
        new = int(self.first_block[row])
        for target, source in zip(self._parts(new, blocks), self._parts(old, blocks), strict=True):
            target[:] = source
        self._release(old, blocks)

    def tokens_of(self, row: int) -> slice:
        """Where the row's tokens are in :attr:`slot` and :attr:`live`."""
        first = int(self.first_block[row]) * self.block_size
        return slice(first, first + int(self.num_tokens[row]))

    def places_of(self, row: int) -> slice:
        """Where the row's block list is in :attr:`block_id` and :attr:`block_live`."""
        first = int(self.first_block[row])
        return slice(first, first + int(self.num_places[row]))

    def mark_dead(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64], token_ids: IdArray
    ) -> SlotArray:
        """Tokens of several requests die.

        Args:
            rows, counts: requests, and how many tokens each loses; ``[n]``.
            token_ids: one request after the other, distinct and live; ``[counts.sum()]``.

        Returns:
            Their slots, ``[counts.sum()]``.

        Raises:
            TokenTableError: an id is unknown, dead or repeated; nothing was changed.
        """
        owner = np.repeat(rows, counts)
        outside = (token_ids < 0) | (token_ids >= self.num_tokens[owner])
        if np.count_nonzero(outside):
            i = int(outside.argmax())
            end = self.num_tokens[owner[i]] - 1
            raise TokenTableError(f"token {token_ids[i]} is outside 0 … {end}")
        at = self.first_block[owner] * self.block_size + token_ids
        alive = self.live[at]
        if np.count_nonzero(alive) < len(at):
            raise TokenTableError(f"token {token_ids[alive.argmin()]} is already dead")
        ascending = (token_ids[1:] > token_ids[:-1]) | (owner[1:] != owner[:-1])
        if np.count_nonzero(ascending) < len(at) - 1 and len(distinct := np.unique(at)) < len(at):
            raise TokenTableError(f"{len(at)} ids to evict, only {len(distinct)} distinct")
        self.live[at] = False
        np.subtract.at(self.group_live, at // GROUP, np.int32(1))
        self.num_live[rows] -= counts
        slots: SlotArray = self.slot[at]
        return slots

    def _parts(self, first: int, blocks: int) -> list[NDArray[Any]]:
        """What is stored of a range of whole groups, as views."""
        start, end = first * self.block_size, (first + blocks) * self.block_size
        block, group, token = (
            slice(first, first + blocks),
            slice(start // GROUP, end // GROUP),
            slice(start, end),
        )
        where = (block, block, group, token, token)
        return [getattr(self, name)[part] for name, part in zip(_REGION_FIELDS, where, strict=True)]

    # -- regions ---------------------------------------------------------------------------

    def _place(self, row: int, size: int) -> None:
        """Give the row a new region of a power of two of the smallest ones."""
        found = size
        while not self._free.get(found):
            found *= 2
            if found > self._num_regions:
                self._grow()
                found = size
        start = self._free[found].pop()
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(start + found)
        self.first_block[row] = start * REGION_BLOCKS
        self.num_reserved[row] = size * REGION_BLOCKS

    def _release(self, first: int, blocks: int) -> None:
        """Zero a region and let others have it."""
        for part in self._parts(first, blocks):
            part[:] = 0
        self._let_go(first // REGION_BLOCKS, blocks // REGION_BLOCKS)

    def _let_go(self, start: int, size: int) -> None:
        """Join a region with its free neighbour, and so on."""
        while size < self._num_regions and (start ^ size) in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(start)

    def _grow(self) -> None:
        for name in _REGION_FIELDS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._num_regions *= 2
        self._let_go(self._num_regions // 2, self._num_regions // 2)


def _power_of_two(least: int) -> int:
    """The smallest one that is not below ``least``."""
    return 1 << max(0, least - 1).bit_length()


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """``starts[i] … starts[i] + lengths[i] - 1`` for each ``i``, one after the other."""
    ends = np.cumsum(lengths)
    index: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    index += np.arange(len(index))
    return index
