"""vLLM's private scheduler names, turned into public hooks (checked against 0.32).

Finish, abort and preemption all pass through ``_free_request_blocks``: one hook sees every way
in which a request loses its blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vtoken.integration.vllm.compat.replaced import replaced

NEVER_CACHED = 1 << 60
"""As a count of cached blocks: no later block of the request is ever hashed."""


class SchedulerHooks(Scheduler):
    """A vLLM scheduler that announces lost blocks and preemptions.

    It also mends one thing: vLLM enters blocks into the prefix cache when it gives them out. Under
    priorities it may preempt a request that it has given blocks in the same step, whose tokens are
    then never computed; who found them in the cache would read what others left there.
    """

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
        _forget_uncomputed(self.kv_cache_manager, request)
        super()._preempt_request(request, *args, **kwargs)


def _forget_uncomputed(manager: KVCacheManager, request: Request) -> None:
    """Take out of the prefix cache what the request got in the step that is being scheduled."""
    (group,) = manager.coordinator.single_type_managers
    first = request.num_computed_tokens // group.block_size
    blocks = group.req_to_blocks.get(request.request_id, [])[first:]
    manager.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})


def num_leading_empty_blocks(pool: BlockPool, limit: int) -> int:
    """Blocks at the front of the free queue without cached content, at most ``limit``.

    vLLM puts freed blocks without a hash to the front and those with one to the end.
    """
    limit = min(limit, pool.get_num_free_blocks())
    block, count = pool.free_block_queue.fake_free_list_head.next_free_block, 0
    while count < limit and block is not None and block.block_hash is None:
        block, count = block.next_free_block, count + 1
    return count


def is_waiting(request: Request) -> bool:
    """Whether the request asks to be admitted rather than to grow."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def is_running(request: Request) -> bool:
    """Whether the request holds blocks and may be scheduled."""
    return bool(request.status == RequestStatus.RUNNING)


def fail_requests(scheduler: Scheduler, output: ModelRunnerOutput, req_ids: list[str]) -> None:
    """End requests with an error when this output is processed, without this step's token.

    Rides on the set that vLLM keeps for failed grammars, which it ends in
    ``update_from_output`` with an error to the client. Logprobs of the prompt go with the token:
    where there is none, vLLM asserts that there are no logprobs either.
    """
    for req_id in req_ids:
        scheduler.grammar_compile_error_reqs.add(req_id)
        output.prompt_logprobs_dict.pop(req_id, None)
        output.prompt_token_id_logprobs_dict.pop(req_id, None)
        index = output.req_id_to_index.get(req_id)
        if index is not None and output.sampled_token_ids:
            output.sampled_token_ids[index] = []


def limited_step(scheduler: Scheduler, max_num_tokens: int) -> AbstractContextManager[None]:
    """Let the scheduler give out at most ``max_num_tokens`` inside the block."""
    limit = min(scheduler.max_num_scheduled_tokens, max_num_tokens)
    return replaced(scheduler, "max_num_scheduled_tokens", limit)


class AllocationGuard(Protocol):
    """Has a say in every allocation of blocks."""

    def reserved_blocks(self, request: Request) -> int:
        """Free blocks that the request's allocation must leave."""

    def admission_blocks(self, request: Request) -> int | None:
        """Blocks that must be free to admit a waiting request whose prompt need not fit as a
        whole; None if it must."""

    def make_room(self, request: Request) -> bool:
        """The allocation failed: free at least one block, or return False."""

    def granted(self, request: Request) -> None:
        """The request has its blocks for this step."""

    def rescued(self, request: Request) -> None:
        """An allocation that had failed succeeded after :meth:`make_room`."""

    def refused(self, request: Request, needed_blocks: int) -> None:
        """The allocation failed for good while blocks were reserved."""


def guard_allocations(manager: KVCacheManager, guard: AllocationGuard) -> None:
    """Put the guard in front of ``manager.allocate_slots``, in place."""
    allocate = manager.allocate_slots
    block_size = manager.coordinator.single_type_managers[0].block_size

    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        reserved_blocks: int = 0,
        full_sequence_must_fit: bool = False,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        extra = guard.reserved_blocks(request)
        needed = guard.admission_blocks(request) if full_sequence_must_fit else None
        if needed is not None:
            full_sequence_must_fit = False
            total = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
            extra += max(0, needed - -(-total // block_size))

        def attempt(extra: int) -> KVCacheBlocks | None:
            return allocate(
                request,
                num_new_tokens,
                num_new_computed_tokens,
                *args,
                reserved_blocks=reserved_blocks + extra,
                full_sequence_must_fit=full_sequence_must_fit,
                **kwargs,
            )

        blocks = attempt(extra)
        short = blocks is None
        while blocks is None and guard.make_room(request):
            blocks = attempt(extra)
        if short and blocks is not None:
            guard.rescued(request)
        if blocks is None and extra and is_running(request):
            blocks = attempt(0)  # rather the last block than a preemption
        if blocks is not None:
            guard.granted(request)
        elif extra and not is_running(request):
            total = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
            own = -(-total // block_size) - num_new_computed_tokens // block_size
            guard.refused(request, max(own, needed or 0))
        return blocks

    manager.allocate_slots = allocate_slots
