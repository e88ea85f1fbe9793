"""Everything the token layer knows about one running request, and its invariants' subject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtoken.observation import RequestSignals
from vtoken.occupancy import RequestBlocks
from vtoken.ports import BlockPoolPort
from vtoken.request_options import NO_OPTIONS, RequestOptions
from vtoken.table_store import TableStore
from vtoken.token_table import TokenTable
from vtoken.types import IdArray, RelocationMoves, SlotArray


@dataclass(eq=False)
class RelocationPlan:
    """One reserved relocation: destinations are taken, nothing is committed.

    Attributes:
        req_id: whose tokens move.
        source_indices: ``[k]`` places of the sources in the request's block list, ascending.
        dst_blocks: ``[d]`` blocks taken from the pool, ``d < k``.
        moves: token by token.
        num_computed: tokens of the request whose K/V was complete when it was made.
        ticket: batch it was sent with.
        orphaned: its request ended first; only the destinations remain to be freed.
    """

    req_id: str
    source_indices: NDArray[np.int64]
    dst_blocks: NDArray[np.int32]
    moves: RelocationMoves
    num_computed: int = 0
    ticket: int = 0
    orphaned: bool = False


class RowChange(NamedTuple):
    """What must happen to the worker's row of a request.

    Attributes:
        slots: the row as it must be, whole, or None: drop columns from what is there.
        dropped: columns of what is there whose tokens died, ascending, or None. With ``slots``
            they concern what goes along with the row: accumulated scores.
    """

    slots: SlotArray | None
    dropped: IdArray | None


@dataclass(eq=False)
class RequestKV:
    """Table, block occupancy and eviction schedule of one request.

    Numbers that a step looks at for all requests, such as :attr:`next_evict_at`, are in the
    :class:`~vtoken.table_store.TableStore`, as table and block list are.

    Attributes:
        req_id: vLLM's internal id.
        num_prompt_tokens: length of the prompt.
        request_seed: derived from the prompt, for reproducible random policies.
        prefill_end: logical length at which the prefill is complete.
        num_evicted: tokens evicted so far.
        plan: relocation in flight, at most one (I4).
        row_stale: the worker's row must be sent whole before the next forward.
        dropped: columns of the worker's row that died since the last message, None if none did.
        left_empty: places of the block list whose block has lost all live tokens but was not
            closed: others may come, or already be on their way. None if there is none.
        window_missed: the present policy looks at the prefill's last queries, but came after them.
        last_signals: what its last eviction went by, kept only where tokens may go early.
        options: what the request itself asked for.
        generation: in which it arrived; says which policy document it follows.
        max_num_tokens: logical length that it cannot exceed, None if nobody knows.
        num_evictions: times that tokens of it were evicted.
        num_relocations: plans of it that were committed, and ``stall_seconds``, how long
            forwards waited for the batches that they were in.
    """

    req_id: str
    store: TableStore
    blocks: RequestBlocks
    num_prompt_tokens: int
    request_seed: int
    prefill_end: int
    num_evicted: int = 0
    plan: RelocationPlan | None = None
    row_stale: bool = False
    dropped: IdArray | None = None
    left_empty: IdArray | None = None
    window_missed: bool = False
    last_signals: RequestSignals | None = None
    options: RequestOptions = NO_OPTIONS
    generation: int = 0
    max_num_tokens: int | None = None
    num_evictions: int = 0
    num_relocations: int = 0
    stall_seconds: float = 0.0

    @property
    def row(self) -> int:
        """Where its numbers are in the store."""
        return self.blocks.row

    @property
    def table(self) -> TokenTable:
        """Where each token is."""
        return TokenTable(self.store, self.blocks.row)

    @property
    def num_tokens(self) -> int:
        """Logical length."""
        return int(self.store.num_tokens[self.row])

    @property
    def num_live(self) -> int:
        """Live tokens."""
        return int(self.store.num_live[self.row])

    @property
    def num_retained(self) -> int:
        """Blocks held."""
        return self.blocks.retained

    @property
    def num_places(self) -> int:
        """Length of the block list, places that were given back included."""
        return self.blocks.length

    @property
    def block_size(self) -> int:
        """Slots per block (S)."""
        return self.store.block_size

    @property
    def ideal_blocks(self) -> int:
        """⌈live / S⌉: blocks it would hold if live tokens were packed."""
        return -(-self.num_live // self.block_size)

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

    @property
    def next_evict_at(self) -> int:
        """Logical length at which the next eviction is due."""
        return int(self.store.next_evict_at[self.row])

    @next_evict_at.setter
    def next_evict_at(self, num_tokens: int) -> None:
        self.store.next_evict_at[self.row] = num_tokens

    def add_tokens(self, num_tokens: int) -> None:
        """The request is ``num_tokens`` long from now on; new tokens are live."""
        start = self.num_tokens
        if num_tokens > start:
            self.table.sync_new_tokens(self.blocks.ids[start // self.block_size :], num_tokens)
            self.blocks.add_tokens(start, num_tokens)

    def drop_columns(self, columns: IdArray) -> None:
        """Tokens died: those of these columns of the row, as it is after earlier deaths. The
        caller sets ``row_changed``.

        Args:
            columns: ascending.
        """
        earlier = self.dropped
        if earlier is not None:
            # In what earlier deaths left, column c stands behind all that died at or before it.
            gaps = earlier - np.arange(len(earlier))
            columns = columns + gaps.searchsorted(columns, "right")
            columns = np.sort(np.concatenate([earlier, columns]))
        self.dropped = columns

    def send_row(self) -> None:
        """The worker's row must be sent whole."""
        self.row_stale = True
        self.store.row_changed[self.row] = True

    def take_row_change(self, before: int) -> RowChange | None:
        """What the worker must do to its row before it appends; each change is handed out once.

        Args:
            before: logical length without the tokens that it appends.
        """
        self.store.row_changed[self.row] = False
        slots = self.table.live_slots(before) if self.row_stale else None
        dropped, self.dropped = self.dropped, None
        self.row_stale = False
        return None if slots is None and dropped is None else RowChange(slots, dropped)

    def give_back(self, places: NDArray[np.int64], pool: BlockPoolPort) -> None:
        """Return the blocks at these places of the block list, without live token, to the pool.

        Raises:
            TokenTableError: a block still has live tokens, or a place is already empty.
        """
        block_ids = self.blocks.give_back(places)
        pool.replace(self.req_id, places.tolist(), [0] * len(places))
        pool.free(block_ids[::-1].tolist())
