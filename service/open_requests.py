"""How many requests each key has open: in this process, or over all API processes of the server."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Lock
from typing import Any, Protocol

import numpy as np

NUM_ROWS = 16_384
"""Keys that may have open requests at once, where several processes count."""

LOCK_SECONDS = 1.0
"""The lock is held for microseconds; one that is held longer belongs to a process that died."""


class OpenRequests(Protocol):
    """Counts what is open."""

    def enter(self, key: str, most: int) -> bool:
        """Count one more of this key, unless it has ``most``; whether it was counted."""

    def leave(self, key: str) -> None:
        """One that had entered has ended."""


class LocalOpenRequests:
    """Of one process."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def enter(self, key: str, most: int) -> bool:
        """See :class:`OpenRequests`."""
        if self._open[key] >= most:
            return False
        self._open[key] += 1
        return True

    def leave(self, key: str) -> None:
        """See :class:`OpenRequests`."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class SharedOpenRequests:
    """Of several processes, exactly: a table in shared memory.

    A row is a mark, 64 bits of the key's hash, and a count; a row that counts nothing is free.

    Args:
        lock: of the table.
        table: from :func:`make_table`.
    """

    def __init__(self, lock: Lock, table: Any) -> None:
        self._lock = lock
        self._marks, self._counts = np.frombuffer(table, np.uint64).reshape(2, NUM_ROWS)

    def enter(self, key: str, most: int) -> bool:
        """See :class:`OpenRequests`; a full table has room for no new key."""
        mark = _mark(key)
        with self._held():
            row = self._row_of(mark)
            if row is None:
                row = int(self._counts.argmin())
                if self._counts[row]:
                    return False
                self._marks[row] = mark
            if self._counts[row] >= most:
                return False
            self._counts[row] += 1
            return True

    def leave(self, key: str) -> None:
        """See :class:`OpenRequests`."""
        with self._held():
            if (row := self._row_of(_mark(key))) is not None:
                self._counts[row] -= 1

    def _row_of(self, mark: int) -> int | None:
        found = np.flatnonzero((self._marks == np.uint64(mark)) & (self._counts > 0))
        return int(found[0]) if found.size else None

    @contextmanager
    def _held(self) -> Iterator[None]:
        is_held = self._lock.acquire(timeout=LOCK_SECONDS)
        try:
            yield
        finally:
            if is_held:
                self._lock.release()


def make_table(context: SpawnContext) -> Any:
    """Shared memory for :class:`SharedOpenRequests`; nothing is open."""
    return context.RawArray("Q", 2 * NUM_ROWS)


def _mark(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
