"""Stopping without losing what was accepted.

On the first SIGTERM or SIGINT vLLM's server asks its engine client to shut down, in a thread of
its own; :meth:`Drain.wait` holds it there until the requests that were accepted have ended, or time
is up, or a second signal says not to wait. Requests that come meanwhile are answered with 503.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
"""Long enough for a load balancer to have taken this server out."""

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
        self._num_open = 0
        self._changed = threading.Condition()

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return self._num_open

    def enter(self) -> bool:
        """Count one more request, unless the server is draining; whether it was accepted."""
        with self._changed:
            if self.is_draining:
                return False
            self._num_open += 1
            return True

    def leave(self) -> None:
        """A request that had entered has ended."""
        with self._changed:
            self._num_open -= 1
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
            logger.info("stopping: %d open requests may finish", self._num_open)
            while self._num_open and not self.aborted_by:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            lost = self._num_open
        if lost:
            why = "a second signal came" if self.aborted_by else f"{self._seconds:g} s are over"
            logger.warning("stopping: %s, %d open requests are cut off", why, lost)
        return lost


class DrainingShutdown:
    """Stands for the engine client's ``shutdown``: first the drain, then vLLM's.

    Must be made in the event loop's thread. That thread may call it as well, when the server is
    over: then nothing is waited for.
    """

    def __init__(self, client: Any, drain: Drain) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.current_thread()
        self._drain = drain
        self._shutdown = client.shutdown
        client.shutdown = self

    def __call__(self, timeout: float | None = None) -> None:
        """Shut down; vLLM's server calls it from a thread of its executor."""
        if threading.current_thread() is not self._loop_thread:
            self._loop.call_soon_threadsafe(self._heed_second_signal)
            # Nothing is left to finish, or nothing is to be waited for.
            timeout = 0 if self._drain.wait() else CLOSE_SECONDS
        self._shutdown(timeout=timeout)

    def _heed_second_signal(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._drain.abort, int(number))
