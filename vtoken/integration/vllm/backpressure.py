"""Who gets the last blocks (paper §3.3, stage 2): headroom, backpressure, urgent relocation.

The headroom is carved out of the pool. Waiting requests never get it. Running requests do, but
for one block, which stays as destination of urgent relocations: before vLLM preempts, live
tokens are packed at once and the freed blocks are handed over. A request that runs alone may
take everything, so holding blocks back can delay but never stop the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vtoken.integration.vllm.compat.scheduler_side import is_running, is_waiting
from vtoken.ports import BlockPoolPort
from vtoken.token_layer import TokenLayer


class Backpressure:
    """The allocation guard, idle in mode ``naive``, and the account of what it costs."""

    def __init__(
        self, layer: TokenLayer, pool: BlockPoolPort, num_running: Callable[[], int]
    ) -> None:
        self._layer = layer
        self._pool = pool
        self._num_running = num_running
        self._held_back = False
        self._held_since: float | None = None

    # -- AllocationGuard -------------------------------------------------------------------

    def reserved_blocks(self, request: Any) -> int:
        """The headroom for a waiting request, one block for a running one that has company."""
        headroom = self._layer.headroom_blocks
        if is_running(request):
            return min(1, headroom) if self._num_running() > 1 else 0
        if not self._num_running():
            return 0
        # Destinations in flight are headroom at work: they need not be reserved again.
        return max(0, headroom - self._layer.reclamation.blocks_in_flight())

    def make_room(self, request: Any) -> bool:
        """Pack the most wasteful request at once, for a running request only."""
        return is_running(request) and self._layer.config.relocates and self._layer.reclaim_now()

    def rescued(self, request: Any) -> None:
        """Count a preemption that did not happen."""
        self._layer.stats.inc("preemptions_avoided_total")

    def refused(self, request: Any, needed_blocks: int) -> None:
        """A waiting request counts as held back if only the headroom stood in its way."""
        if is_waiting(request) and needed_blocks <= self._pool.num_free_blocks():
            self._held_back = True

    # -- account ---------------------------------------------------------------------------

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
