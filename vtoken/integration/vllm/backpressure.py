"""Headroom-aware admission (paper §3.3, stage 2): keep destinations for relocations free.

The headroom is carved out of the pool. Waiting requests never get it; running requests get it
once relocation has nothing to do. A request that runs alone may always proceed, so holding
blocks back can delay but never stop the engine.
"""

from __future__ import annotations

import time

from vtoken.ports import BlockPoolPort
from vtoken.token_layer import TokenLayer


class Backpressure:
    """Decides how many free blocks an allocation must leave, and counts what that costs."""

    def __init__(self, layer: TokenLayer, pool: BlockPoolPort) -> None:
        self._layer = layer
        self._pool = pool
        self._held_back = False
        self._held_since: float | None = None

    def reserved_blocks(self, waiting: bool, num_running: int) -> int:
        """Free blocks that the request's allocation must leave.

        Args:
            waiting: the request asks for admission (otherwise: to grow).
            num_running: requests in the running list, the asking one included if it runs.
        """
        layer = self._layer
        if num_running <= (0 if waiting else 1):
            return 0
        if not waiting and layer.occupancy.waste_ratio <= layer.config.theta_f:
            return 0
        # Destinations in flight are headroom at work: they need not be reserved again.
        return max(0, layer.config.headroom_blocks - layer.reclamation.blocks_in_flight())

    def refused(self, needed_blocks: int) -> None:
        """A waiting request was refused; it counts if only the headroom stood in its way."""
        if needed_blocks <= self._pool.num_free_blocks():
            self._held_back = True

    def step_begins(self) -> None:
        """Before vLLM schedules."""
        self._held_back = False

    def step_decided(self) -> None:
        """After vLLM has scheduled: account for the step and the time since the last one."""
        now = time.monotonic()
        stats = self._layer.stats
        if self._held_since is not None:
            stats.inc("headroom_backpressure_seconds_total", now - self._held_since)
        if self._held_back:
            stats.inc("headroom_backpressure_total")
        self._held_since = now if self._held_back else None
