"""Stopping without losing what was accepted.

On the first SIGTERM or SIGINT vLLM's server asks its engine client to shut down, in a thread of
its own; :meth:`Drain.wait` holds it there until the requests that were accepted have ended, or time
is up, or a second signal says not to wait: then those that are left are told so. Requests that come
meanwhile are answered with 503.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
"""Long enough for a load balancer to have taken this server out."""

CUT_SECONDS = 2.0
"""For requests that were cut off to end, before the engine is killed under them."""

CLOSE_SECONDS = 10
"""For an engine without work to close what it has open; then it is killed."""


class Drain:
    """Counts open requests; the event loop's thread counts, any other may wait.

    Attributes:
        is_draining: the server was told to stop.
        aborted_by: number of the signal that told it so again, or 0.
    """

    def __init__(self, seconds: float) -> None:
        self.is_draining = False
        self.aborted_by = 0
        self._seconds = seconds
        self._open: set[Callable[[], None]] = set()
        self._changed = threading.Condition()

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._open)

    def enter(self, cut: Callable[[], None]) -> bool:
        """Count one more request, unless the server is draining; whether it was accepted.

        ``cut`` ends it early; any thread may call it.
        """
        with self._changed:
            if self.is_draining:
                return False
            self._open.add(cut)
            return True

    def leave(self, cut: Callable[[], None]) -> None:
        """The request that had entered with ``cut`` has ended."""
        with self._changed:
            self._open.discard(cut)
            self._changed.notify_all()

    def abort(self, number: int) -> None:
        """Let nobody wait any longer; ``number`` is the second signal's."""
        with self._changed:
            self.is_draining, self.aborted_by = True, number
            self._changed.notify_all()

    def wait(self) -> int:
        """Refuse new requests from now on and wait for the open ones; blocks this thread.

        Returns:
            How many were still open when it gave up: 0 if nothing is lost.
        """
        deadline = time.monotonic() + self._seconds
        with self._changed:
            self.is_draining = True
            logger.info("stopping: %d open requests may finish", len(self._open))
            while self._open and not self.aborted_by:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            lost = len(self._open)
            if lost:
                why = "a second signal came" if self.aborted_by else f"{self._seconds:g} s are over"
                logger.warning("stopping: %s, %d open requests are cut off", why, lost)
                for cut in self._open:
                    cut()
                self._changed.wait_for(lambda: not self._open, CUT_SECONDS)
        return lost


class DrainingShutdown:
    """Stands for the engine client's ``shutdown``: first the drain, then vLLM's.

    ``hurry`` is called if requests were lost: the HTTP server is not to wait for them for ever.

    Must be made in the event loop's thread. That thread may call it as well, when the server is
    over: then nothing is waited for.
    """

    def __init__(self, client: Any, drain: Drain, hurry: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.current_thread()
        self._drain = drain
        self._hurry = hurry
        self._shutdown = client.shutdown
        client.shutdown = self

    def __call__(self, timeout: float | None = None) -> None:
        """Shut down; vLLM's server calls it from a thread of its executor."""
        if threading.current_thread() is not self._loop_thread:
            self._loop.call_soon_threadsafe(self._heed_second_signal)
            timeout = CLOSE_SECONDS
            if self._drain.wait():
                self._hurry()
                timeout = 0
        self._shutdown(timeout=timeout)

    def _heed_second_signal(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._drain.abort, int(number))
