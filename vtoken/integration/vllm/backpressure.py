"""Who gets the last blocks (paper §3.3, stage 2): headroom, backpressure, urgent relocation.

The headroom is carved out of the pool. Waiting requests never get it. Running requests do, but
for one block, which stays as destination of urgent relocations: before vLLM preempts, live
tokens are packed at once and the freed blocks are handed over. A request that runs alone may
take everything, so holding blocks back can delay but never stop the engine.

With ``evict_during_prefill`` a prompt need not fit as a whole: it is admitted when its budget
fits, and computed in chunks that leave half of the free blocks to others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vtoken.integration.vllm.compat.scheduler_side import is_running, is_waiting
from vtoken.integration.vllm.options import generation_of, options_of
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
        self._granted: set[str] = set()
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

    def admission_blocks(self, request: Any) -> int | None:
        """What the request keeps, and one block in which its next chunk begins.

        A request with a policy or protected spans of its own must fit as a whole: it may keep
        more than its budget.
        """
        layer, options = self._layer, options_of(request)
        document = layer.evictor.documents.of(generation_of(request))
        if not layer.admits_in_parts_under(document):
            return None
        if options.policy_key is not None or options.protect:
            return None
        if not self._num_running():
            return 0
        num_tokens: int = request.num_tokens
        kept = min(num_tokens, options.target_live_tokens(document.config, num_tokens))
        return -(-kept // self._pool.block_size) + 1

    def max_step_tokens(self) -> int | None:
        """Tokens of a step such that no chunk of a prefill takes more than half of the free
        blocks; None without limit."""
        if not self._layer.admits_in_parts:
            return None
        free = self._pool.num_free_blocks() - self._layer.headroom_blocks
        return self._num_running() + max(1, free // 2) * self._pool.block_size

    def make_room(self, request: Any) -> bool:
        """Pack the most wasteful request at once, for a running request only."""
        self._layer.reclamation.reservations.note_shortage()
        return is_running(request) and self._layer.reclaim_now(self._granted)

    def granted(self, request: Any) -> None:
        """Remember whose blocks of this step are settled."""
        self._granted.add(request.request_id)

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
        self._granted.clear()

    def step_decided(self) -> None:
        """After vLLM has scheduled: account for the step and the time since the last one."""
        now = time.monotonic()
        stats = self._layer.stats
        if self._held_since is not None:
            stats.inc("headroom_backpressure_seconds_total", now - self._held_since)
        if self._held_back:
            stats.inc("headroom_backpressure_total")
        self._held_since = now if self._held_back else None
