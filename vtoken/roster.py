"""Who is tracked, and what happens to all of them in a step: new tokens, and who may be due."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import repeat

import numpy as np

from vtoken.occupancy import BlockOccupancy
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RequestKV, RowChange
from vtoken.table_store import NOBODY
from vtoken.types import IdArray


class Roster:
    """All tracked requests by id, and by their row of the store.

    Attributes:
        requests: by id; only :meth:`add` and :meth:`remove` change it.
    """

    def __init__(self, pool: BlockPoolPort, occupancy: BlockOccupancy) -> None:
        """Start with no request."""
        self.requests: dict[str, RequestKV] = {}
        self._pool = pool
        self._occupancy = occupancy
        self._rows: dict[str, int] = {}
        self._of_row: dict[int, RequestKV] = {}
        self._asked: list[str] | None = None
        self._rows_asked = np.empty(0, np.int64)

    def add(self, kv: RequestKV) -> None:
        """Track a request, whose row is its own from now on."""
        self.requests[kv.req_id] = kv
        self._rows[kv.req_id] = kv.row
        self._of_row[kv.row] = kv
        self._asked = None

    def remove(self, req_id: str) -> RequestKV | None:
        """Forget a request, whose row is still its own; None if it is not tracked."""
        kv = self.requests.pop(req_id, None)
        if kv is not None:
            del self._of_row[self._rows.pop(req_id)]
            self._asked = None
        return kv

    def rows_of(self, req_ids: Collection[str]) -> IdArray:
        """Rows of these requests, :data:`NOBODY` for those that are not tracked.

        Every step of a decode asks for the same ones: to be asked again costs one comparison.
        """
        asked = list(req_ids)
        if asked != self._asked:
            found = map(self._rows.get, asked, repeat(NOBODY))
            self._rows_asked = np.fromiter(found, np.int64, len(asked))
            self._rows_asked.flags.writeable = False
            self._asked = asked
        return self._rows_asked

    def tracks(self, req_ids: Collection[str]) -> bool:
        """Whether all of these are tracked."""
        return NOBODY not in self.rows_of(req_ids)

    def may_be_due(self, req_ids: Collection[str]) -> list[RequestKV]:
        """Those of these requests, in their order, that are tracked and long enough for their next
        eviction, tokens in flight included."""
        store = self._occupancy.store
        rows = self.rows_of(req_ids)
        due = rows[store.num_tokens[rows] >= store.next_evict_at[rows]]
        return [self._of_row[row] for row in due.tolist()]

    def schedule_step(
        self, num_scheduled: Mapping[str, int], lengths: IdArray
    ) -> dict[str, RowChange]:
        """Register the tokens that a step will compute, of all its requests.

        Args:
            num_scheduled: new tokens per request.
            lengths: the requests' logical lengths after the step, in that order. Tokens between
                what is known of a request and its new tokens come from the prefix cache.

        Returns:
            What must happen to the worker's rows before the new tokens are appended.
        """
        store, rows = self._occupancy.store, self.rows_of(num_scheduled)
        num_new = np.fromiter(num_scheduled.values(), np.int64, len(num_scheduled))
        before = lengths - num_new
        decoding, known = rows, store.num_tokens[rows]
        decodes = (num_new == 1) & (known == before)
        if not decodes.all():
            for i in (~decodes).nonzero()[0].tolist():
                self._add_tokens(self._of_row[int(rows[i])], int(lengths[i]))
            decoding, known = rows[decodes], known[decodes]
        full = known >= store.num_places[decoding] * store.block_size
        self._add_blocks([self._of_row[row] for row in decoding[full].tolist()])
        self._occupancy.add_one_token(decoding, known)
        changes = {}
        for i in store.row_changed[rows].nonzero()[0].tolist():
            kv = self._of_row[int(rows[i])]
            change = kv.take_row_change(int(before[i]))
            if change is not None:
                changes[kv.req_id] = change
        return changes

    def _add_tokens(self, kv: RequestKV, num_tokens: int) -> None:
        """Tokens of a prefill, or none."""
        if num_tokens > kv.num_places * kv.block_size:
            self._add_blocks([kv])
        kv.add_tokens(num_tokens)

    def _add_blocks(self, requests: list[RequestKV]) -> None:
        """The block lists of these requests have grown, in decode by one block each."""
        if not requests:
            return
        new = [self._pool.new_blocks(kv.req_id, kv.num_places) for kv in requests]
        ids = np.concatenate(new)
        if len(ids) == len(new) and all(map(len, new)):
            self._occupancy.add_one_block(np.array([kv.row for kv in requests]), ids)
            return
        for kv, block_ids in zip(requests, new, strict=True):
            kv.blocks.extend(block_ids)
