"""The block-pool port over vLLM's own pool, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vtoken.block_map import CACHED
from vtoken.integration.vllm.block_manager import VLLMBlockPool


def make_pool(num_blocks: int = 8) -> tuple[VLLMBlockPool, BlockPool]:
    """Our view and vLLM's pool behind it."""
    pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=16)
    group = SimpleNamespace(block_size=16)
    coordinator = SimpleNamespace(single_type_managers=[group])
    manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)
    return VLLMBlockPool(cast(Any, manager)), pool


def test_all_references_tell_held_shared_cached_and_free_apart() -> None:
    """By block id; the null block is first."""
    view, pool = make_pool()
    first, second, third = pool.get_new_blocks(3)
    pool.touch([second])
    third.set_block_hash(make_block_hash_with_group_id(BlockHash(b"x" * 32), 0))
    pool.free_blocks([third])
    references = view.all_references()
    assert len(references) == 8
    assert references[first.block_id] == 1
    assert references[second.block_id] == 2
    assert references[third.block_id] == CACHED
    assert (references[1:] <= 0).sum() == view.num_free_blocks() == 5
    assert (references[1:] == 0).sum() == 4
