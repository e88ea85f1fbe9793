"""vLLM's private scheduler names, turned into public hooks (checked against 0.32).

Finish, abort and preemption all pass through ``_free_request_blocks``: one hook sees every way
in which a request loses its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

NEVER_CACHED = 1 << 60
"""As a count of cached blocks: no later block of the request is ever hashed."""


class SchedulerHooks(Scheduler):
    """A vLLM scheduler that announces lost blocks and preemptions."""

    def on_blocks_freed(self, request: Request) -> None:
        """The request is about to lose all its blocks."""
        raise NotImplementedError

    def on_preempted(self, request: Request) -> None:
        """vLLM preempts the request; :meth:`on_blocks_freed` follows."""
        raise NotImplementedError

    def _free_request_blocks(self, request: Request) -> None:
        self.on_blocks_freed(request)
        super()._free_request_blocks(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.on_preempted(request)
        super()._preempt_request(request, *args, **kwargs)


def is_waiting(request: Request) -> bool:
    """Whether the request asks to be admitted rather than to grow."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def is_running(request: Request) -> bool:
    """Whether the request holds blocks and may be scheduled."""
    return bool(request.status == RequestStatus.RUNNING)


def reserve_headroom(
    manager: KVCacheManager,
    reserve: Callable[[Request], int],
    refused: Callable[[Request, int], None],
) -> None:
    """Make allocations leave blocks alone.

    Args:
        manager: its ``allocate_slots`` is wrapped in place.
        reserve: how many free blocks this request must leave.
        refused: called with the request and the blocks that it would have needed, whenever an
            allocation fails and something was reserved.
    """
    allocate = manager.allocate_slots

    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *args: Any,
        reserved_blocks: int = 0,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        extra = reserve(request)
        blocks = allocate(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            *args,
            reserved_blocks=reserved_blocks + extra,
            **kwargs,
        )
        if blocks is None and extra:
            total = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
            size = manager.coordinator.single_type_managers[0].block_size
            refused(request, -(-total // size) - num_new_computed_tokens // size)
        return blocks

    manager.allocate_slots = allocate_slots
