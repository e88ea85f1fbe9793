"""CUDA's streams and events as a recording: work happens at once, order is what is kept.

There is no ``synchronize`` anywhere: an engine that asked for it would fail.
"""

from contextlib import contextmanager

import torch


class FakeEvent:
    """Happens when its recording says; time is the place in the log."""

    def __init__(self, log, name):
        self._log, self.name = log, name
        self.happened = True
        self.time = None

    def record(self, stream):
        self.time = len(self._log)
        self._log.append(("record", stream.name, self.name))

    def query(self):
        assert self.time is not None, f"{self.name} was never recorded"
        return self.happened

    def elapsed_time(self, end_event):
        assert self.happened
        assert end_event.happened
        return float(end_event.time - self.time)


class FakeStream:
    """Waits are recorded; they must name an event that was recorded before."""

    def __init__(self, log, name):
        self._log, self.name = log, name

    def wait_event(self, event):
        assert event.time is not None, f"{self.name} waits for {event.name}, which nobody records"
        self._log.append(("wait", self.name, event.name))


class FakeStreams:
    """See :class:`vtoken.copy_engine.cuda.Streams`; ``log`` has every call in order."""

    def __init__(self):
        self.log = []
        self.events = []
        self._compute = FakeStream(self.log, "compute")
        self._relocation = FakeStream(self.log, "relocation")
        self.current = self._compute

    def compute(self):
        return self._compute

    def relocation(self):
        return self._relocation

    def event(self):
        event = FakeEvent(self.log, f"event {len(self.events)}")
        self.events.append(event)
        return event

    @contextmanager
    def on_relocation(self):
        self.current = self._relocation
        try:
            yield
        finally:
            self.current = self._compute

    def upload(self, slots):
        self.log.append(("upload", self.current.name, slots.shape))
        return torch.from_numpy(slots.copy())


class RecordingPool:
    """Passes copies on to ``pool`` and records on which stream they were queued."""

    def __init__(self, pool, streams, failing=False):
        self._pool, self._streams, self._failing = pool, streams, failing
        self.num_slots = pool.num_slots

    def copy(self, src_slots, dst_slots):
        self._streams.log.append(("copy", self._streams.current.name, len(src_slots)))
        if self._failing:
            raise RuntimeError("an illegal memory access was encountered\nand more")
        return self._pool.copy(src_slots, dst_slots)
