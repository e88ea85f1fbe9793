"""What the token layer asks of the block pool underneath (paper Fig. 2: the block runtime).

The vLLM integration implements it over vLLM's pool, tests over a model of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vtoken.types import BoolArray


class BlockPoolPort(Protocol):
    """A reference-counted pool of blocks and the per-request block lists over it."""

    block_size: int
    num_total_blocks: int
    caches_prefixes: bool

    def num_free_blocks(self) -> int:
        """Blocks that nobody references, those with cached content included."""

    def num_empty_blocks(self, limit: int) -> int:
        """Free blocks that :meth:`allocate` takes before any with cached content; counts no
        further than ``limit``."""

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """Take ``num_blocks`` free blocks (the caller has checked), one reference each."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block."""

    def shared(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """Which blocks another request references too."""

    def references(self, block_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many references each block has; the null block is not asked for."""

    def cached(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """In which blocks a prefix can be found, referenced or not."""

    def new_blocks(self, req_id: str, start: int) -> NDArray[np.int32]:
        """Block ids of the request's block list from index ``start`` on."""

    def replace(self, req_id: str, indices: Sequence[int], block_ids: Sequence[int]) -> None:
        """Put blocks (0: none) into places of the request's list, without touching references."""

    def stop_caching(self, req_id: str) -> None:
        """From now on no block of the request enters the prefix cache."""
