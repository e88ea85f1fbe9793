"""The K/V bytes of whole tokens over all layers: what a relocation copies and I1 hashes.

Rows of all layers that share one allocation (vLLM puts every layer of a KV cache group in one)
are seen as a single ``[rows, words]`` matrix, so that a batch of moves is one gather and one
scatter, not two per layer: fewer calls that need the GIL while the engine works on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from vtoken.kv_view import SlotGeometry, SplitKV

_STAGING_BYTES = 16 * 2**20
"""Most bytes a gather holds at once, so that a large plan cannot spike memory at peak load."""


class _Arena:
    """Layers of one geometry in one storage, as rows of machine words.

    Attributes:
        rows: ``[total_rows, words]``; a layer starts at its entry of ``layer_starts``.
    """

    def __init__(self, views: Sequence[SplitKV]) -> None:
        self.geometry: SlotGeometry = views[0].geometry
        rows = [view.rows for view in views]
        head_size = self.geometry.head_size
        first = min(r.storage_offset() for r in rows)
        starts = [(r.storage_offset() - first) // head_size for r in rows]
        last = max(start + r.shape[0] for start, r in zip(starts, rows, strict=True))
        joined = rows[0].as_strided((last, head_size), (head_size, 1), first)
        # Copies move bytes, not numbers: 8-byte words are faster and exact for every dtype.
        unit = joined.element_size()
        aligned = head_size * unit % 8 == 0 and first * unit % 8 == 0
        self.rows = joined.view(torch.int64 if aligned else torch.uint8)
        self.layer_starts = torch.tensor(starts, dtype=torch.int64)

    @property
    def bytes_per_token(self) -> int:
        """K/V bytes of one token in the layers of this arena."""
        per_row: int = self.rows.shape[1] * self.rows.element_size()
        return len(self.layer_starts) * 2 * self.geometry.num_kv_heads * per_row

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of canonical ``slots`` (``[n]``) in every layer, layer-major: ``[L * n * 2H]``."""
        in_layer = self.geometry.token_rows(slots)
        return (self.layer_starts[:, None, None] + in_layer).reshape(-1)


class KVPool:
    """All layers' caches, addressed by canonical slot."""

    def __init__(self, layers: Sequence[SplitKV]) -> None:
        assert layers, "a KV pool needs at least one layer"
        groups: dict[tuple[object, ...], list[SplitKV]] = {}
        for layer in layers:
            groups.setdefault(_arena_key(layer), []).append(layer)
        self._arenas = [_Arena(views) for views in groups.values()]
        self.num_slots = min(layer.num_slots for layer in layers)
        self.bytes_per_token = sum(arena.bytes_per_token for arena in self._arenas)

    def copy(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> int:
        """Copy tokens slot by slot in all layers; both int64 ``[n]``, disjoint.

        Returns:
            Bytes written.
        """
        step = max(1, _STAGING_BYTES // self.bytes_per_token)
        for src, dst in zip(src_slots.split(step), dst_slots.split(step), strict=True):
            for arena in self._arenas:
                staged = arena.rows.index_select(0, arena.index(src))
                arena.rows.index_copy_(0, arena.index(dst), staged)
        return len(src_slots) * self.bytes_per_token

    def digest(self, slots: torch.Tensor) -> str:
        """BLAKE2b over the K/V bytes of ``slots`` (int64 ``[n]``), in order, over all layers.

        Depends on contents and order only, not on where the tokens lie.
        """
        hasher = hashlib.blake2b(digest_size=16)
        for block in self._blocks(slots):
            hasher.update(block.view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def _blocks(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        step = max(1, _STAGING_BYTES // self.bytes_per_token)
        for arena in self._arenas:
            for part in slots.split(step):
                yield arena.rows.index_select(0, arena.index(part))


def _arena_key(layer: SplitKV) -> tuple[object, ...]:
    rows = layer.rows
    # Layers whose distance is no whole number of rows cannot share one [rows, D] matrix.
    phase = rows.storage_offset() % layer.geometry.head_size
    return (rows.untyped_storage().data_ptr(), rows.dtype, layer.geometry, phase)
