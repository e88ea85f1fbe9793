"""Everything the token layer knows about one running request, and its invariants' subject."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtoken.observation import RequestSignals
from vtoken.occupancy import RequestBlocks
from vtoken.ports import BlockPoolPort
from vtoken.request_options import NO_OPTIONS, RequestOptions
from vtoken.token_table import TokenTable
from vtoken.types import IdArray, RelocationMoves


@dataclass(eq=False)
class RelocationPlan:
    """One reserved relocation: destinations are taken, nothing is committed.

    Attributes:
        req_id: whose tokens move.
        source_indices: ``[k]`` places of the sources in the request's block list, ascending.
        dst_blocks: ``[d]`` blocks taken from the pool, ``d < k``.
        moves: token by token.
        ticket: batch it was sent with.
        orphaned: its request ended first; only the destinations remain to be freed.
    """

    req_id: str
    source_indices: NDArray[np.int64]
    dst_blocks: NDArray[np.int32]
    moves: RelocationMoves
    ticket: int = 0
    orphaned: bool = False


@dataclass(eq=False)
class RequestKV:
    """Table, block occupancy and eviction schedule of one request.

    A decode token goes where its index says, so it is only counted when it is scheduled, and
    written into :attr:`table` and :attr:`blocks` when somebody looks at them. The totals of
    :class:`~vtoken.occupancy.BlockOccupancy`, and with them F, never lag behind.

    Attributes:
        req_id: vLLM's internal id.
        num_prompt_tokens: length of the prompt.
        request_seed: derived from the prompt, for reproducible random policies.
        prefill_end: logical length at which the prefill is complete.
        next_evict_at: logical length at which the next eviction is due.
        num_tokens: logical length, tokens not yet written into the table included.
        capacity: tokens that the known blocks hold.
        num_evicted: tokens evicted so far.
        plan: relocation in flight, at most one (I4).
        row_stale: the worker's row must be rebuilt before the next forward.
        row_ids: ids of the tokens in the worker's row at the first eviction since it was last
            rebuilt, None if there was none.
        window_missed: the present policy looks at the prefill's last queries, but came after them.
        kept_columns: with the row last built: columns of the row before that survived, None if
            no token was evicted in between or nobody observes.
        last_signals: what its last eviction went by, kept only where tokens may go early.
        options: what the request itself asked for.
        generation: in which it arrived; says which policy document it follows.
        max_num_tokens: logical length that it cannot exceed, None if nobody knows.
        num_evictions: times that tokens of it were evicted.
        num_relocations: plans of it that were committed, and ``stall_seconds``, how long
            forwards waited for the batches that they were in.
    """

    req_id: str
    _table: TokenTable
    _blocks: RequestBlocks
    num_prompt_tokens: int
    request_seed: int
    prefill_end: int
    next_evict_at: int
    num_tokens: int = 0
    capacity: int = 0
    num_evicted: int = 0
    plan: RelocationPlan | None = None
    row_stale: bool = field(default=True)
    row_ids: IdArray | None = None
    window_missed: bool = False
    kept_columns: NDArray[np.int32] | None = None
    last_signals: RequestSignals | None = None
    options: RequestOptions = NO_OPTIONS
    generation: int = 0
    max_num_tokens: int | None = None
    num_evictions: int = 0
    num_relocations: int = 0
    stall_seconds: float = 0.0

    @property
    def table(self) -> TokenTable:
        """Where each token is; complete."""
        if self.num_tokens != self._table.num_tokens:
            self.write_announced()
        return self._table

    @property
    def blocks(self) -> RequestBlocks:
        """The block list with live tokens per block; complete."""
        if self.num_tokens != self._table.num_tokens:
            self.write_announced()
        return self._blocks

    @property
    def num_live(self) -> int:
        """Live tokens."""
        return self._table.num_live + self.num_tokens - self._table.num_tokens

    @property
    def num_retained(self) -> int:
        """Blocks held."""
        return self._blocks.retained

    @property
    def num_places(self) -> int:
        """Length of the block list, places that were given back included."""
        return self._blocks.length

    @property
    def block_size(self) -> int:
        """Slots per block (S)."""
        return self._table.block_size

    @property
    def ideal_blocks(self) -> int:
        """⌈live / S⌉: blocks it would hold if live tokens were packed."""
        return -(-self.num_live // self._table.block_size)

    def growth(self, unknown: int) -> tuple[int, int]:
        """Blocks that its block list may still grow by, within the next steps and in all.

        Args:
            unknown: in all, if nobody knows its end.

        Returns:
            The rest of its prompt, or one block for what it generates; and all, never less.
        """
        size, places = self.block_size, self.num_places
        last = self.max_num_tokens
        in_all = unknown if last is None else max(0, -(-last // size) - places)
        soon = max(1, -(-self.prefill_end // size) - places)
        return min(soon, in_all), in_all

    def announce_tokens(self, num_tokens: int) -> None:
        """The request is ``num_tokens`` long from now on; new tokens are live."""
        self._blocks.announce_tokens(num_tokens - self.num_tokens)
        self.num_tokens = num_tokens

    def add_blocks(self, block_ids: NDArray[np.int32]) -> None:
        """vLLM's block list has grown by these."""
        self._blocks.extend(block_ids)
        self.capacity = self._blocks.length * self._table.block_size

    def write_announced(self) -> None:
        """Bring table and blocks up to ``num_tokens``; readers get it done for them."""
        table, blocks = self._table, self._blocks
        start = table.num_tokens
        if start == self.num_tokens:
            return
        table.sync_new_tokens(blocks.ids[start // table.block_size :], self.num_tokens)
        blocks.place_tokens(start, self.num_tokens)

    def give_back(self, places: NDArray[np.int64], pool: BlockPoolPort) -> None:
        """Return the blocks at these places of the block list, without live token, to the pool.

        Raises:
            TokenTableError: a block still has live tokens, or a place is already empty.
        """
        block_ids = self.blocks.give_back(places)
        pool.replace(self.req_id, places.tolist(), [0] * len(places))
        pool.free(block_ids[::-1].tolist())
