"""Listens to the engine: a question about once a second, and when it was last answered.

Readiness, liveness and the estimate of the queue are judged by what is kept here. A question that
is not answered stays open: no second one is asked meanwhile, so a hung engine collects none.

Not one question with that of ``poller.py``, although both come about once a second: this one is
asked in every mode and by every API process, at an interval that no setting changes and without a
time limit; the statistics are asked by one process, as often as ``metrics_poll_seconds`` says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

UTILITY_NAME = "vtoken_pulse"
INTERVAL_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pulse:
    """One answer of the engine; see ``vtoken.integration.vllm.pulse``.

    Attributes:
        engines: where there are several, each one's own; the other numbers are sums then.
    """

    running: int
    waiting: int
    steps: int | None
    relocation_disabled: str | None = None
    failed_relocations: float = 0.0
    engines: tuple[Pulse, ...] = ()

    @property
    def parts(self) -> tuple[Pulse, ...]:
        """One for each engine."""
        return self.engines or (self,)

    def is_progress(self, last: Pulse) -> bool:
        """Whether this one engine made a step since ``last``, or has nothing to do."""
        is_idle = self.running + self.waiting == 0
        return is_idle or self.steps is None or self.steps != last.steps

    @classmethod
    def parse(cls, reply: Mapping[str, Any]) -> Pulse:
        """From the engine's reply.

        Raises:
            KeyError, TypeError: it has not the agreed form.
        """
        return cls(
            int(reply["running"]),
            int(reply["waiting"]),
            reply["steps"],
            reply.get("relocation_disabled"),
            float(reply.get("failed_relocations", 0.0)),
            tuple(map(cls.parse, reply.get("engines", ()))),
        )


@dataclass
class PulseRecord:
    """What is known of the engine.

    Attributes:
        pulse: the last answer, None before the first.
        answered: when it came; before the first, when the server started. Monotonic seconds, as
            all times here.
        progressed: when the engine last made a step, or had nothing to do; of several engines,
            that for which this is longest ago.
        slowest: the place of that engine among them.
        copy_failed: when a relocation was last seen to fail; None: never.
        dead: whether vLLM knows that the engine has died.
    """

    answered: float
    progressed: float
    pulse: Pulse | None = None
    copy_failed: float | None = None
    dead: bool = False
    slowest: int = 0
    _progressed: tuple[float, ...] = ()

    def note(self, pulse: Pulse, now: float) -> None:
        """Take an answer into account; mutates."""
        last, parts = self.pulse, pulse.parts
        if last is None or len(last.parts) != len(parts):
            self._progressed = (now,) * len(parts)
        else:
            self._progressed = tuple(
                now if part.is_progress(before) else then
                for part, before, then in zip(parts, last.parts, self._progressed, strict=True)
            )
        self.progressed = min(self._progressed)
        self.slowest = self._progressed.index(self.progressed)
        if last is not None and pulse.failed_relocations > last.failed_relocations:
            self.copy_failed = now
        self.pulse, self.answered = pulse, now


class PulseWatch:
    """Asks for ever, and keeps :attr:`record` up to date.

    Args:
        call: vLLM's utility call.
        is_dead: whether the engine is known to have died.
        on_pulse: called with every answer and its time.
        interval_seconds: between two questions.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        is_dead: Callable[[], bool],
        *,
        on_pulse: Callable[[Pulse, float], None] = lambda pulse, now: None,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._is_dead = is_dead
        self._on_pulse = on_pulse
        self._interval_seconds = interval_seconds
        self.clock = clock
        self._record = PulseRecord(answered=clock(), progressed=clock())

    @property
    def record(self) -> PulseRecord:
        """What is known at this moment."""
        self._record.dead = self._is_dead()
        return self._record

    async def run(self) -> None:
        """Ask until cancelled; a failure is no answer and never ends it."""
        while True:
            try:
                pulse = Pulse.parse(await self._call(UTILITY_NAME))
            except Exception as error:  # its absence is what readiness reports
                logger.debug("no pulse: %s", error)
            else:
                now = self.clock()
                self._record.note(pulse, now)
                self._on_pulse(pulse, now)
            await asyncio.sleep(self._interval_seconds)
