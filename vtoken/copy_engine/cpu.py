"""Copy engine of the CPU: one worker thread, torch index copies with the GIL released."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from vtoken.copy_engine.base import CopyEngine
from vtoken.kv_pool import KVPool
from vtoken.types import CopyResult, SlotArray

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Batch:
    """One submitted batch; the worker thread fills the lower half, then sets ``done``."""

    ticket: int
    src_slots: torch.Tensor
    dst_slots: torch.Tensor
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    copy_seconds: float = 0.0
    num_bytes: int = 0


class CpuCopyEngine(CopyEngine):
    """Runs batches one after the other on a daemon thread.

    ``submit``, ``wait_before_read``, ``poll`` and ``close`` belong to one thread, the one that
    runs the model.
    """

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool.num_slots)
        self._pool = pool
        self._todo: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._outstanding: deque[_Batch] = deque()
        self._joined: list[CopyResult] = []
        self._thread = threading.Thread(target=self._work, name="vtoken-copy", daemon=True)
        self._thread.start()

    def _start(self, ticket: int, src_slots: SlotArray, dst_slots: SlotArray) -> None:
        batch = _Batch(ticket, _as_index(src_slots), _as_index(dst_slots))
        self._outstanding.append(batch)
        self._todo.put(batch)

    def wait_before_read(self) -> None:
        """Block until every outstanding batch is copied or has failed."""
        while self._outstanding:
            batch = self._outstanding.popleft()
            start = time.monotonic()
            already_done = batch.done.is_set()
            batch.done.wait()
            stall = 0.0 if already_done else time.monotonic() - start
            self._joined.append(
                CopyResult(batch.ticket, batch.error, batch.copy_seconds, stall, batch.num_bytes)
            )

    def poll(self) -> tuple[CopyResult, ...]:
        """See :meth:`CopyEngine.poll`."""
        results, self._joined = tuple(self._joined), []
        return results

    def close(self) -> None:
        """Join what is outstanding, then end the thread."""
        self.wait_before_read()
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._todo.get()) is not None:
            start = time.monotonic()
            try:
                # The cache may be an inference tensor, which nothing else may write in place.
                with torch.inference_mode():
                    batch.num_bytes = self._pool.copy(batch.src_slots, batch.dst_slots)
            # Whatever went wrong, the sources are intact and the plan can be rolled back; an
            # exception that left this thread would instead hang the engine in its next wait.
            except Exception as error:
                batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
                logger.exception("copying relocation batch %d failed", batch.ticket)
            finally:
                batch.copy_seconds = time.monotonic() - start
                batch.done.set()


def _as_index(slots: SlotArray) -> torch.Tensor:
    # Own memory: the message that carried the array may be gone before the copy runs.
    return torch.from_numpy(slots.astype("int64"))
