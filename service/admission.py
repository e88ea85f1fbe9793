"""How long a request that comes now would wait before the engine starts it.

The engine starts waiting requests at some rate: what was sent to it, less what still waits, over
the last half minute. The wait is the length of the queue over that rate. While the queue is empty a
request waits for nothing, and before anything was measured nobody is refused.
"""

from __future__ import annotations

from collections import deque

from service.pulse import Pulse
from service.tally import Tally

WINDOW_SECONDS = 30.0


class QueueEstimate:
    """Fed by the sender of requests and by the engine's pulse; the event loop's thread calls it.

    Args:
        sent: sequences that went to the engine, also from other processes.
    """

    def __init__(self, sent: Tally | None = None) -> None:
        self._sent = sent or Tally()
        self._num_sent_before = 0  # when the engine last said how many wait
        self._waiting = 0
        self._started: deque[tuple[float, int]] = deque()

    def sent(self, num_sequences: int) -> None:
        """So many sequences went to the engine."""
        self._sent.add(num_sequences)

    def withdrawn(self, num_sequences: int) -> None:
        """So many ended without an output: they were no measure of the engine's speed."""
        self._sent.add(-num_sequences)
        self._num_sent_before = min(self._num_sent_before, self._sent.total())

    def note(self, pulse: Pulse, now: float) -> None:
        """Take the engine's count of waiting requests into account; ``now`` in seconds."""
        self._waiting = pulse.waiting
        num_sent = self._sent.total()
        self._num_sent_before = num_sent
        if not pulse.waiting:
            self._started.clear()  # an idle engine's rate is no measure for a busy one's
        last = self._started[-1][1] if self._started else 0
        self._started.append((now, max(last, num_sent - pulse.waiting)))
        while self._started[0][0] < now - WINDOW_SECONDS:
            self._started.popleft()

    def wait_seconds(self) -> float:
        """Seconds until a request that comes now would start; 0 where nothing says otherwise."""
        if not self._waiting or len(self._started) < 2:
            return 0.0
        (first_time, first), (last_time, last) = self._started[0], self._started[-1]
        ahead = self._waiting + max(0, self._sent.total() - self._num_sent_before)
        # One start that is about to come: a queue that stands still has a finite wait, too.
        return (ahead + 1) * (last_time - first_time) / max(1, last - first)
