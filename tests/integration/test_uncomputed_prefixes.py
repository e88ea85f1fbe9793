"""A preempted request's blocks of the step that it no longer takes part in."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.integration.schedulers import SIZE, make_scheduler, step
from vtoken.integration.vllm.scheduler import VTokenScheduler

CHUNK = 2 * SIZE


def add_hashed(
    scheduler: VTokenScheduler,
    req_id: str,
    prompt: list[int],
    priority: int,
    num_output_tokens: int,
) -> Request:
    """A request whose full blocks are hashed for the prefix cache."""
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    request = Request(
        req_id,
        prompt,
        SamplingParams(max_tokens=num_output_tokens, ignore_eos=True),
        None,
        arrival_time=float(len(scheduler.requests)),
        priority=priority,
        block_hasher=get_request_block_hasher(SIZE, hash_function),
    )
    scheduler.add_request(request)
    return request


@pytest.mark.parametrize("mode", ["naive", "lazy"])
def test_a_chunk_that_was_taken_back_is_in_no_prefix_cache(mode: str) -> None:
    """vLLM enters blocks into the prefix cache when it gives them out. Under priorities it may take
    them back in the same step, before anything is computed into them: whoever found them there
    would read whatever lies in these slots.
    """
    engine = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 2 * CHUNK,
        "long_prefill_token_threshold": CHUNK,
        "scheduler_reserve_full_isl": False,
        "async_scheduling": False,
    }
    scheduler = make_scheduler(17, "priority", engine, mode=mode, headroom_blocks=0)
    low = add_hashed(scheduler, "low", [10 + i for i in range(230)], 9, 4)
    step(scheduler)
    add_hashed(scheduler, "high", [3] * (3 * SIZE - 2), 1, 4)
    for _ in range(10):
        num_computed_tokens = low.num_computed_tokens
        ran = step(scheduler)
        if low.num_preemptions:
            break
    assert (ran, num_computed_tokens) == ({"high"}, 6 * CHUNK)
    _, num_hit_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(low)
    assert num_hit_tokens == num_computed_tokens
