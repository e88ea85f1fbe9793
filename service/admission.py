"""How long a request that comes now would wait before the engine starts it.

The engine starts waiting requests at some rate: what was sent to it, less what still waits, over
the last half minute. The wait is the length of the queue over that rate. While the queue is empty a
request waits for nothing, and before anything was measured nobody is refused.
"""

from __future__ import annotations

from collections import deque

from service.pulse import Pulse

WINDOW_SECONDS = 30.0


class QueueEstimate:
    """Fed by the sender of requests and by the engine's pulse; the event loop's thread calls it."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_sent_before = 0  # when the engine last said how many wait
        self._waiting = 0
        self._started: deque[tuple[float, int]] = deque()

    def sent(self, num_sequences: int) -> None:
        """So many sequences went to the engine."""
        self._num_sent += num_sequences

    def withdrawn(self, num_sequences: int) -> None:
        """So many ended without an output: they were no measure of the engine's speed."""
        self._num_sent -= num_sequences
        self._num_sent_before = min(self._num_sent_before, self._num_sent)

    def note(self, pulse: Pulse, now: float) -> None:
        """Take the engine's count of waiting requests into account; ``now`` in seconds."""
        self._waiting = pulse.waiting
        self._num_sent_before = self._num_sent
        if not pulse.waiting:
            self._started.clear()  # an idle engine's rate is no measure for a busy one's
        last = self._started[-1][1] if self._started else 0
        self._started.append((now, max(last, self._num_sent - pulse.waiting)))
        while self._started[0][0] < now - WINDOW_SECONDS:
            self._started.popleft()

    def wait_seconds(self) -> float:
        """Seconds until a request that comes now would start; 0 where nothing says otherwise."""
        if not self._waiting or len(self._started) < 2:
            return 0.0
        (first_time, first), (last_time, last) = self._started[0], self._started[-1]
        ahead = self._waiting + max(0, self._num_sent - self._num_sent_before)
        # One start that is about to come: a queue that stands still has a finite wait, too.
        return (ahead + 1) * (last_time - first_time) / max(1, last - first)
