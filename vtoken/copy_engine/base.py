"""Contract of the copy engines that carry out relocations (paper §3.4).

Life of a batch: the worker submits it right after the forward of step N returned; the copies
overlap sampling, scheduling and input preparation; ``wait_before_read`` joins them before
anything in step N + 1 may write or read the cache; ``poll`` then hands out the results, which
travel to the scheduler with the output of step N + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from vtoken.errors import CopyError
from vtoken.types import CopyResult, SlotArray


class CopyEngine(ABC):
    """Copies the K/V of tokens from slot to slot in all layers, off the critical path.

    Batches are carried out in order of submission; a batch may be submitted while others are
    outstanding. A batch that fails is reported, it never raises in the engine loop: its
    destinations hold garbage, its sources are untouched.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def submit(self, ticket: int, src_slots: SlotArray, dst_slots: SlotArray) -> None:
        """Start copying ``src_slots[i]`` to ``dst_slots[i]`` (canonical, ``[n]`` int32).

        Raises:
            CopyError: lengths differ, a slot is outside the pool, a destination is named twice
                or is also a source. Nothing was started.
        """
        check_moves(src_slots, dst_slots, self._num_slots)
        self._start(ticket, src_slots, dst_slots)

    @abstractmethod
    def _start(self, ticket: int, src_slots: SlotArray, dst_slots: SlotArray) -> None:
        """Queue a checked batch; returns at once."""

    @abstractmethod
    def wait_before_read(self) -> None:
        """Order every outstanding batch before whatever reads or writes the cache next.

        Measures, per batch, how long that held the caller (or the compute stream) up.
        """

    @abstractmethod
    def poll(self) -> tuple[CopyResult, ...]:
        """Results of batches that a wait has joined, each once, in order of submission.

        A batch that merely happens to be done is not reported: what a step reports must not
        depend on timing, or runs could not be compared bit by bit.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what is outstanding and release threads or streams. May be called twice."""


def check_moves(src_slots: SlotArray, dst_slots: SlotArray, num_slots: int) -> None:
    """Refuse a batch that a copy in any order could get wrong.

    Raises:
        CopyError: see :meth:`CopyEngine.submit`; the message carries the numbers.
    """
    if len(src_slots) != len(dst_slots):
        raise CopyError(f"{len(src_slots)} sources but {len(dst_slots)} destinations")
    for name, slots in (("source", src_slots), ("destination", dst_slots)):
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            raise CopyError(
                f"{name} slots span {int(slots.min())}..{int(slots.max())}, "
                f"the pool has 0..{num_slots - 1}"
            )
    unique = np.unique(dst_slots)
    if len(unique) != len(dst_slots):
        raise CopyError(f"{len(dst_slots)} destinations name only {len(unique)} distinct slots")
    shared = np.intersect1d(src_slots, unique)
    if len(shared):
        raise CopyError(
            f"{len(shared)} slots are source and destination at once, first {int(shared[0])}"
        )
