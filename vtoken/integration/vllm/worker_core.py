"""What the worker does with the messages of the scheduler, independent of any model runner.

Order within one step (hazards in brackets):

1. ``begin_step``: take the message. If vLLM is about to zero or copy blocks, or no forward
   follows, outstanding relocations are joined here [they read blocks that may be rewritten].
   Urgent relocations are carried out [this step may write to the blocks they empty].
2. ``update_rows``: drop ended requests, set the rows the scheduler sent, drop dead columns.
3. ``append``: add this step's write slots; join whatever is still outstanding [the forward may
   write into source blocks of a rolled-back plan, and reads destinations of committed ones].
4. the forward.
5. ``after_forward``: hash if asked, then start the copies of this step's plan; accumulate what
   the sampled layers observed [reads keys of live tokens; copies write free blocks only].
6. ``report``: results of the batches that 1 or 3 joined, merged over the ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.copy_engine.base import CopyEngine
from vtoken.errors import CopyError, TokenTableError
from vtoken.integration.vllm.messages import (
    RelocationBatch,
    SignalReport,
    StepMessage,
    StepReport,
    VerifyResult,
)
from vtoken.integration.vllm.observer import LayerObserver, Observer
from vtoken.integration.vllm.ranks import OneRank, Ranks, merged
from vtoken.integration.vllm.slot_rows import RowArray, SlotRows, WriteSlots
from vtoken.kv_pool import KVPool
from vtoken.paged_pool import PagedPool
from vtoken.types import CopyResult, SlotArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Check:
    """A digest taken before a copy and the slots to hash again after it."""

    ticket: int
    req_id: str
    digest_before: str
    slots_after: torch.Tensor


class WorkerCore:
    """Rows, relocations and their verification of one worker; one thread calls it."""

    def __init__(
        self,
        rows: SlotRows,
        engine: CopyEngine,
        pool: KVPool | PagedPool,
        observer: Observer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.rows = rows
        self._observer = observer
        self._ranks = ranks or OneRank()
        self._engine = engine
        self._pool = pool
        self._message = StepMessage()
        self._checks: list[_Check] = []
        self._refused: list[CopyResult] = []
        self._settled: list[CopyResult] = []
        self._verified: list[VerifyResult] = []
        self._scheduled: Sequence[str] = ()
        self._seconds = 0.0
        self._signals: dict[str, SignalReport] = {}

    def begin_step(self, message: StepMessage, *, join_now: bool) -> None:
        """Take the message of a step; with ``join_now`` finish outstanding copies first."""
        self._message = message
        self._scheduled = ()
        self._seconds = 0.0
        self._signals = {}
        if join_now or message.urgent:
            self._join()
        for batch in message.urgent:
            # One at a time: a batch may read what the one before it wrote.
            self._start(batch)
            self._join()

    def update_rows(self, ended: Iterable[str], must_have_row: Iterable[str]) -> None:
        """Drop rows of ``ended`` requests, then follow the message.

        ``must_have_row`` names requests that start or resume in this step.

        Raises:
            TokenTableError: one of these came without a row.
        """
        with self._timed():
            # Dropping goes first: an id may be aborted and submitted again within one step.
            self.rows.drop(ended)
            missing = [req_id for req_id in must_have_row if req_id not in self._message.rows]
            if missing:
                raise TokenTableError(
                    f"{len(missing)} new or resumed requests came without a row, first "
                    f"{missing[0]!r}; the message names {len(self._message.rows)} rows"
                )
            whole, dropped = self._message.rows, self._message.dropped
            for req_id, slots in whole.items():
                self.rows.set_row(req_id, slots)
            self.rows.drop_columns({r: c for r, c in dropped.items() if r not in whole})
            if self._observer is not None:
                self._observer.update_rows(self._message, must_have_row)

    def append(
        self,
        req_ids: Sequence[str],
        num_new: NDArray[np.int32],
        write_slots: WriteSlots,
    ) -> tuple[RowArray, RowArray]:
        """Append this step's new tokens and join outstanding copies: the forward is next.

        Args:
            req_ids: the batch in the runner's order, ``[num_reqs]``.
            num_new: scheduled tokens per request, ``[num_reqs]``.
            write_slots: canonical slots of the new tokens, ``[num_new.sum()]``.

        Returns:
            Row numbers and live lengths (new tokens included), int64 ``[num_reqs]`` each.
        """
        with self._timed():
            rows = self.rows.rows(req_ids)
            self.rows.append(rows, num_new, write_slots)
            self._scheduled = tuple(req_ids)
            lens = self.rows.lens(rows)
            if self._observer is not None:
                self._observer.begin(self._message.observe, req_ids, num_new)
        self._join()
        return rows, lens

    def after_forward(self) -> None:
        """Start the relocation of this step's message; its sources are complete now."""
        if self._observer is not None:
            self._observer.forward_done()
        if self._message.relocation is not None:
            self._start(self._message.relocation)
        if self._observer is not None:
            with self._timed():
                self._signals = self._observer.end(
                    self._message.want_signals, self._message.own_signals
                )

    def _start(self, batch: RelocationBatch) -> None:
        checks = list(self._hash_sources(batch)) if batch.verify else []
        with self._timed():
            try:
                self._engine.submit(batch.ticket, batch.src_slots, batch.dst_slots)
            except CopyError as error:
                # Every read still goes to the sources: failing the plan loses nothing, while
                # raising here would take all requests down.
                logger.error("relocation batch %d refused: %s", batch.ticket, error)
                self._refused.append(CopyResult(batch.ticket, str(error), 0.0, 0.0, 0))
                return
        self._checks.extend(checks)

    def report(self) -> StepReport:
        """The report of this step, for all ranks; each result is handed out once.

        Ranks exchange their reports only if they hold results or rows, which all ranks decide
        alike: which batches a step joins depends on the messages alone.
        """
        rows: dict[str, SlotArray] = {}
        if self._message.report_rows:
            rows = {req_id: self.rows.canonical(req_id) for req_id in self._scheduled}
        verified, self._verified = tuple(self._verified), []
        copies, self._settled = tuple(self._settled), []
        signals, self._signals = self._signals, {}
        report = StepReport(copies, verified, rows, self._seconds, signals)
        return merged(self._ranks.gather(report)) if copies or rows else report

    @property
    def layer_observer(self) -> LayerObserver | None:
        """What this step's sampled layers report their queries to; None: nobody looks."""
        return None if self._observer is None else self._observer.step

    def close(self) -> None:
        """Finish outstanding copies and release the engine."""
        self._engine.close()

    def _join(self) -> None:
        self._engine.wait_before_read()
        # Refused batches are reported like copied ones: with the step after theirs.
        results = [*self._engine.poll(), *self._refused]
        self._settled.extend(sorted(results, key=lambda result: result.ticket))
        self._refused = []
        # A copy that is known to have failed is rolled back: its bytes prove nothing.
        failed = {result.ticket for result in results if result.error is not None}
        for check in self._checks:
            if check.ticket in failed:
                continue
            after = self._pool.digest(check.slots_after)
            self._verified.append(
                VerifyResult(
                    check.ticket,
                    check.req_id,
                    len(check.slots_after),
                    check.digest_before,
                    after,
                )
            )
        self._checks = []

    def _hash_sources(self, batch: RelocationBatch) -> Iterator[_Check]:
        for i, req_id in enumerate(batch.req_ids):
            part = slice(batch.bounds[i], batch.bounds[i + 1])
            before, after = batch.src_slots[part], batch.dst_slots[part]
            if batch.verify_rows:
                row = self.rows.canonical(req_id)
                before, after = row, moved_row(row, before, after)
            digest = self._pool.digest(_as_index(before))
            yield _Check(batch.ticket, req_id, digest, _as_index(after))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - start


def moved_row(row: SlotArray, src_slots: SlotArray, dst_slots: SlotArray) -> SlotArray:
    """``row`` (logical order) with every source replaced by its destination; a new array.

    Raises:
        TokenTableError: a source is not in the row.
    """
    order = np.argsort(row)
    found = np.searchsorted(row, src_slots, sorter=order)
    places = order[np.minimum(found, len(row) - 1)] if len(row) else found
    if (len(row) == 0 and len(src_slots)) or not np.array_equal(row[places], src_slots):
        raise TokenTableError(
            f"some of {len(src_slots)} source slots are not in the row of {len(row)} live tokens"
        )
    moved = row.copy()
    moved[places] = dst_slots
    return moved


def _as_index(slots: SlotArray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))
