"""Copy engine of CUDA: a stream of its own, ordered by events, never by the host.

    compute     forward N │●                        ○── forward N+1 ──
                          ▼ forward event           ▲ relocation event
    relocation            ├── copies of plan N ──●──┘

``submit`` records an event behind everything that the compute stream was given (the forward, and
vLLM's zeroing and copying of blocks before it) and lets the relocation stream wait for it.
``wait_before_read`` lets the compute stream wait for every outstanding batch, whether or not the
requests it moves still exist: its destinations may already belong to others. Nothing here waits
for the device, so what was measured is known only later: see :class:`CudaCopyEngine`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.copy_engine.base import CopyEngine
from vtoken.paged_pool import Mover, move_by_index
from vtoken.types import CopyResult, SlotArray

logger = logging.getLogger(__name__)


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self, stream: Any) -> None:
        """Happens when ``stream`` gets here."""

    def query(self) -> bool:
        """Whether it happened; does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to ``end_event``; both happened."""


class Stream(Protocol):
    """The part of ``torch.cuda.Stream`` that is used."""

    def wait_event(self, event: Any) -> None:
        """What the stream is given from now on comes after ``event``."""


class Streams(Protocol):
    """CUDA as the engine sees it; tests record the calls instead."""

    def compute(self) -> Stream:
        """The stream that the model's work is queued on."""

    def relocation(self) -> Stream:
        """The engine's own stream."""

    def event(self) -> Event:
        """A new event that measures time."""

    def on_relocation(self) -> AbstractContextManager[Any]:
        """Work queued inside goes to the relocation stream."""

    def upload(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """Queue a copy of ``slots`` to the device on the current stream; it owns its memory."""


class CudaStreams:
    """:class:`Streams` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._relocation = torch.cuda.Stream(device)

    def compute(self) -> Stream:
        """See :class:`Streams`."""
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream

    def relocation(self) -> Stream:
        """See :class:`Streams`."""
        stream: Stream = self._relocation
        return stream

    def event(self) -> Event:
        """See :class:`Streams`."""
        event: Event = torch.cuda.Event(enable_timing=True)
        return event

    def on_relocation(self) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._relocation)
        return context

    def upload(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """See :class:`Streams`. Torch keeps pinned memory until the copy out of it is done."""
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)


class CopyPool(Protocol):
    """What the engine needs of :class:`vtoken.paged_pool.PagedPool`."""

    num_slots: int

    def copy(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> int:
        """Queue the copies on the current stream; returns their bytes."""


@dataclass(eq=False)
class _Batch:
    """A submitted batch: its result so far, and the events that tell when it ran."""

    ticket: int
    started: Event
    done: Event
    num_bytes: int = 0
    error: str | None = None


@dataclass(eq=False)
class _Measurement:
    """Two pairs of events: around a batch's copies, and around the wait for them."""

    started: Event
    done: Event
    before_wait: Event
    after_wait: Event

    def known(self) -> bool:
        """Whether all four happened: the last is behind the others."""
        return self.after_wait.query()

    def seconds(self) -> tuple[float, float]:
        """Copy time and stall."""
        copy_ms = self.started.elapsed_time(self.done)
        stall_ms = self.before_wait.elapsed_time(self.after_wait)
        return copy_ms / 1e3, stall_ms / 1e3


@dataclass(eq=False)
class _Measurements:
    """Measurements in order of submission, handed out as soon as they are known."""

    pending: deque[_Measurement] = field(default_factory=deque)

    def take(self) -> tuple[float, float]:
        """The oldest one, if it is known; otherwise zeros."""
        if self.pending and self.pending[0].known():
            return self.pending.popleft().seconds()
        return 0.0, 0.0


class CudaCopyEngine(CopyEngine):
    """Queues batches on the relocation stream; the host never waits.

    **Times come late.** A batch is reported right after the wait for it was *queued*: the order of
    streams makes that safe. What it took is read from events once they have happened, and then
    travels with the next batch's result; the first results carry zeros. So sums and distributions
    over many batches are right, the times of one ticket are those of an earlier one.
    """

    def __init__(self, pool: CopyPool, streams: Streams) -> None:
        super().__init__(pool.num_slots)
        self._pool = pool
        self._streams = streams
        self._outstanding: deque[_Batch] = deque()
        self._measurements = _Measurements()
        self._joined: list[CopyResult] = []

    def _start(self, ticket: int, src_slots: SlotArray, dst_slots: SlotArray) -> None:
        streams = self._streams
        relocation = streams.relocation()
        forward_done = streams.event()
        forward_done.record(streams.compute())
        relocation.wait_event(forward_done)
        batch = _Batch(ticket, streams.event(), streams.event())
        with streams.on_relocation(), torch.inference_mode():
            batch.started.record(relocation)
            try:
                index = streams.upload(np.stack([src_slots, dst_slots]).astype(np.int64))
                batch.num_bytes = self._pool.copy(index[0], index[1])
            # The sources are intact, so the plan can be rolled back; raised here, a failed launch
            # would take all requests down.
            except Exception as error:
                batch.error = f"{type(error).__name__}: {error}".splitlines()[0]
                logger.exception("queueing relocation batch %d failed", ticket)
            # Behind whatever was queued, also of a batch that failed half way.
            batch.done.record(relocation)
        self._outstanding.append(batch)

    def wait_before_read(self) -> None:
        """Let the compute stream wait for every outstanding batch; returns at once."""
        while self._outstanding:
            batch = self._outstanding.popleft()
            compute = self._streams.compute()
            before, after = self._streams.event(), self._streams.event()
            before.record(compute)
            compute.wait_event(batch.done)
            after.record(compute)
            copy_seconds, stall_seconds = self._measurements.take()
            self._measurements.pending.append(
                _Measurement(batch.started, batch.done, before, after)
            )
            self._joined.append(
                CopyResult(batch.ticket, batch.error, copy_seconds, stall_seconds, batch.num_bytes)
            )

    def poll(self) -> tuple[CopyResult, ...]:
        """See :meth:`CopyEngine.poll`."""
        results, self._joined = tuple(self._joined), []
        return results

    def close(self) -> None:
        """Order what is outstanding before the compute stream's next work."""
        self.wait_before_read()


def choose_mover(device: torch.device) -> Mover:
    """The Triton kernel on CUDA with Triton, otherwise torch's index copies; says which."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from vtoken.copy_engine.triton_kernels import move_by_kernel

        return move_by_kernel
    logger.warning("relocations on %s use torch's index copies: no Triton there", device.type)
    return move_by_index
