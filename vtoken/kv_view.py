"""Slot-addressed views of the KV cache of the CPU layout ("split").

vLLM's CPU cache of one layer is a contiguous ``[num_blocks, num_kv_heads, block_size,
2 * head_size]`` tensor (layout LBHNC). Its kernels see each (block, head) page as ``S`` rows of
keys followed by ``S`` rows of values, a row being ``head_size`` numbers; so do we, because then
the rows of one head are contiguous runs. With ``H`` KV heads and ``S = block_size``::

    row of the [rows, D] view      page
    b*2SH + 0            ┌───────────────────────┐
                         │ head 0   K of offset 0 │  ◀─ kernel slot of (b, 0)
                         │          K of offset 1 │  ◀─ kernel slot of (b, 1)
                         │          …             │
    b*2SH + S            │          V of offset 0 │  ◀─ key row + S
                         │          …             │
    b*2SH + 2S           ├───────────────────────┤
                         │ head 1   K of offset 0 │  ◀─ key row of head 0 + 2S
                         │          …             │
    b*2SH + h*2S + o     │ head h   K of offset o │
    b*2SH + h*2S + S + o │          V of offset o │
                         └───────────────────────┘

A *canonical slot* is ``block * S + offset`` (what the scheduler speaks); a *kernel slot* is the
row of the key of head 0, ``block * 2SH + offset``. The attention ops get K and V as
``[kernel_slots, H, D]`` with strides ``(D, 2SD, 1)`` and a table of kernel slots per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.errors import UnsupportedError

Slots = TypeVar("Slots", NDArray[np.int32], NDArray[np.int64], torch.Tensor)

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SlotGeometry:
    """Arithmetic between canonical slots, kernel slots and rows of one layer.

    Attributes:
        block_size: tokens per block, S.
        num_kv_heads: KV heads of this rank, H.
        head_size: numbers per row, D.
    """

    block_size: int
    num_kv_heads: int
    head_size: int

    @property
    def rows_per_block(self) -> int:
        """Rows of one block: keys and values of all heads, ``2SH``."""
        return 2 * self.block_size * self.num_kv_heads

    def kernel_slots(self, slots: Slots) -> Slots:
        """Kernel slots of canonical ones, same shape and type; a new array."""
        return slots // self.block_size * self.rows_per_block + slots % self.block_size

    def canonical_slots(self, kernel_slots: Slots) -> Slots:
        """The inverse of :meth:`kernel_slots`; a new array."""
        blocks = kernel_slots // self.rows_per_block
        return blocks * self.block_size + kernel_slots % self.rows_per_block

    def key_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the keys of canonical ``slots`` (int64 ``[n]``): ``[n * H]``, token-major.

        The matching value row is always ``block_size`` further.
        """
        heads = torch.arange(self.num_kv_heads) * (2 * self.block_size)
        return (self.kernel_slots(slots)[:, None] + heads).reshape(-1)

    def token_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """All rows of canonical ``slots`` (int64 ``[n]``): ``[n, 2H]``, K then V per head."""
        pages = torch.arange(2 * self.num_kv_heads) * self.block_size
        return self.kernel_slots(slots)[:, None] + pages


@dataclass(frozen=True, eq=False)
class SplitKV:
    """Views of one layer's cache; they share its memory, nothing is copied.

    Attributes:
        geometry: the slot arithmetic of this layer.
        num_blocks: blocks in the cache.
        key, value: ``[kernel_slots, H, D]``, strides ``(D, 2SD, 1)``, for the attention ops.
        rows: ``[num_blocks * 2SH, D]`` contiguous, for writes and copies.
    """

    geometry: SlotGeometry
    num_blocks: int
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Canonical slots of the layer."""
        return self.num_blocks * self.geometry.block_size

    @classmethod
    def from_cache(cls, kv_cache: torch.Tensor) -> SplitKV:
        """View ``kv_cache`` ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

        Raises:
            UnsupportedError: not this shape, not contiguous, or too large for int32 slots.
        """
        if kv_cache.dim() != 4 or kv_cache.shape[3] % 2 or not kv_cache.is_contiguous():
            raise UnsupportedError(
                "the CPU KV cache must be a contiguous [num_blocks, num_kv_heads, block_size, "
                f"2 * head_size] tensor, got shape {tuple(kv_cache.shape)} "
                f"with strides {kv_cache.stride()}"
            )
        num_blocks, num_kv_heads, block_size, width = kv_cache.shape
        geometry = SlotGeometry(block_size, num_kv_heads, width // 2)
        if num_blocks * geometry.rows_per_block > _INT32_MAX:
            raise UnsupportedError(
                f"{num_blocks} blocks of {geometry.rows_per_block} rows exceed the "
                f"{_INT32_MAX} rows that int32 slots can address; use fewer blocks"
            )
        # The last key row of head 0 is the last addressable kernel slot; as_strided checks
        # that the farthest element (head H-1 of the last value) stays inside the storage.
        head_size = geometry.head_size
        last = (num_blocks - 1) * geometry.rows_per_block + block_size
        size = (last, num_kv_heads, head_size)
        stride = (head_size, 2 * block_size * head_size, 1)
        offset = kv_cache.storage_offset()
        return cls(
            geometry=geometry,
            num_blocks=num_blocks,
            key=kv_cache.as_strided(size, stride, offset),
            value=kv_cache.as_strided(size, stride, offset + block_size * head_size),
            rows=kv_cache.view(-1, head_size),
        )
