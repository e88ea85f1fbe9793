"""Brings the engine's statistics to the collector, about once a second, for ever."""

from __future__ import annotations

import asyncio
import logging

from service.engine_link import EngineLink
from service.metrics import VTokenCollector

logger = logging.getLogger(__name__)


class MetricsPoller:
    """Reads snapshots through ``link`` into ``collector``; a failed reading never ends it."""

    def __init__(
        self, link: EngineLink, collector: VTokenCollector, *, interval_seconds: float
    ) -> None:
        self._link = link
        self._collector = collector
        self._interval_seconds = interval_seconds
        self._is_failing = False

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll_once()
            await asyncio.sleep(self._interval_seconds)

    async def poll_once(self) -> None:
        """Read once; a failure is counted, and logged if the reading before had succeeded."""
        try:
            self._collector.update(await self._link.snapshot())
        except Exception as error:  # whatever it is, the next reading may succeed
            self._collector.count_failure()
            if not self._is_failing:
                logger.warning("cannot read the engine's statistics: %s", error)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("the engine's statistics can be read again")
            self._is_failing = False
