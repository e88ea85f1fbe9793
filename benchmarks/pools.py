"""Block pools for the bookkeeping benchmark: a plain one, and vLLM's own without an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vtoken.ports import BlockPoolPort
from vtoken.types import BoolArray


class SimulatedPool(BlockPoolPort, Protocol):
    """A block pool together with what vLLM's scheduler does to it."""

    def grow(self, req_id: str, num_tokens: int) -> None:
        """Allocate until the request's block list covers ``num_tokens``."""


class PlainPool:
    """References in a list, the free blocks in another; no prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_total_blocks = num_blocks
        self.caches_prefixes = False
        self._ref = [1] + [0] * num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._lists: defaultdict[str, list[int]] = defaultdict(list)

    def num_free_blocks(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def num_empty_blocks(self, limit: int) -> int:
        """All free ones are empty."""
        return min(limit, len(self._free))

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """Take blocks, the last freed first."""
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._ref[block] = 1
        return np.array(taken, np.int32)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference each."""
        for block in block_ids:
            self._ref[block] -= 1
            if not self._ref[block]:
                self._free.append(block)

    def shared(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """More than one reference; the null block has it too."""
        ref = self._ref
        return np.array([ref[i] > 1 or i == 0 for i in block_ids.tolist()], np.bool_)

    def references(self, block_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """References of each block."""
        return np.array([self._ref[i] for i in block_ids.tolist()], np.int64)

    def cached(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """None is."""
        return np.zeros(len(block_ids), np.bool_)

    def new_blocks(self, req_id: str, start: int) -> NDArray[np.int32]:
        """The request's block list from ``start`` on."""
        return np.array(self._lists[req_id][start:], np.int32)

    def replace(self, req_id: str, indices: Sequence[int], block_ids: Sequence[int]) -> None:
        """Put blocks into places of the list."""
        blocks = self._lists[req_id]
        for index, block in zip(indices, block_ids, strict=True):
            blocks[index] = block

    def stop_caching(self, req_id: str) -> None:
        """Nothing is cached here."""

    def grow(self, req_id: str, num_tokens: int) -> None:
        """See :class:`SimulatedPool`."""
        blocks = self._lists[req_id]
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing > 0:
            blocks.extend(self.allocate(missing).tolist())


def make_vllm_pool(num_blocks: int, block_size: int) -> SimulatedPool:
    """The port that the engine uses, over vLLM's real block pool and block objects.

    Of vLLM's KV cache manager only what the port reads is built, so no model is needed.
    """
    from vllm.v1.core.block_pool import BlockPool

    from vtoken.integration.vllm.block_manager import VLLMBlockPool

    class VLLMPool(VLLMBlockPool):
        def grow(self, req_id: str, num_tokens: int) -> None:
            blocks = group.req_to_blocks[req_id]
            missing = -(-num_tokens // block_size) - len(blocks)
            if missing > 0:
                blocks.extend(pool.get_new_blocks(missing))

    pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=block_size)
    lists: defaultdict[str, list[Any]] = defaultdict(list)
    group = SimpleNamespace(block_size=block_size, req_to_blocks=lists, num_cached_block={})
    coordinator = SimpleNamespace(single_type_managers=[group])
    return VLLMPool(SimpleNamespace(block_pool=pool, coordinator=coordinator))
