"""The block-pool port over vLLM's own pool.

vLLM sizes allocation by the *length* of a request's block list. So a freed place keeps the
null block and a destination takes the place of a freed source: length, tail and block table
stay right with logical positions, and no accounting of vLLM is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_manager import KVCacheManager

from vtoken.block_map import CACHED
from vtoken.integration.vllm.compat.scheduler_side import (
    NEVER_CACHED,
    num_leading_empty_blocks,
)
from vtoken.types import BoolArray


class VLLMBlockPool:
    """Implements :class:`vtoken.ports.BlockPoolPort` for a model with one KV cache group."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._group = manager.coordinator.single_type_managers[0]
        self._blocks = self._pool.blocks
        self.block_size: int = self._group.block_size
        self.num_total_blocks: int = self._pool.num_gpu_blocks - 1  # the null block is no space
        self.caches_prefixes: bool = self._pool.enable_caching

    def num_free_blocks(self) -> int:
        """Free blocks, cached ones that nobody references included."""
        return int(self._pool.get_num_free_blocks())

    def num_empty_blocks(self, limit: int) -> int:
        """Length of the free queue up to the first block with a hash, or ``limit``."""
        return num_leading_empty_blocks(self._pool, limit)

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """Take free blocks; the least recently used cached content goes first."""
        blocks = self._pool.get_new_blocks(num_blocks)
        return np.fromiter((b.block_id for b in blocks), np.int32, num_blocks)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference each; blocks with cached content stay findable until reused."""
        self._pool.free_blocks([self._blocks[i] for i in block_ids])

    def shared(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """``ref_cnt > 1``; the null block counts as shared."""
        blocks = self._blocks
        counts = np.fromiter((blocks[i].ref_cnt for i in block_ids), np.int64, len(block_ids))
        shared: BoolArray = (counts > 1) | (block_ids == 0)
        return shared

    def references(self, block_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """``ref_cnt`` of each block."""
        blocks = self._blocks
        return np.fromiter((blocks[i].ref_cnt for i in block_ids), np.int64, len(block_ids))

    def cached(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """Which blocks have a hash."""
        blocks = self._blocks
        hashed = (blocks[i].block_hash is not None for i in block_ids)
        return np.fromiter(hashed, np.bool_, len(block_ids))

    def all_references(self) -> NDArray[np.int32]:
        """``ref_cnt`` of every block of the pool by id, or :data:`CACHED`; the null block's too.

        Looks at each block object: the most of what a map costs.
        """
        values = (b.ref_cnt if b.ref_cnt or b.block_hash is None else CACHED for b in self._blocks)
        return np.fromiter(values, np.int32, len(self._blocks))

    def new_blocks(self, req_id: str, start: int) -> NDArray[np.int32]:
        """Ids of the request's block list from ``start`` on."""
        blocks = self._group.req_to_blocks[req_id]
        ids = (blocks[i].block_id for i in range(start, len(blocks)))
        return np.fromiter(ids, np.int32, len(blocks) - start)

    def replace(self, req_id: str, indices: Sequence[int], block_ids: Sequence[int]) -> None:
        """Put blocks into places of the request's list; id 0 is vLLM's null block."""
        blocks = self._group.req_to_blocks[req_id]
        for index, block_id in zip(indices, block_ids, strict=True):
            blocks[index] = self._blocks[block_id]

    def stop_caching(self, req_id: str) -> None:
        """K/V computed after an eviction depends on it and must not be found by others."""
        self._group.num_cached_block[req_id] = NEVER_CACHED
