"""The K/V bytes of whole tokens over all layers of a paged cache: the GPU's twin of ``kv_pool``.

Copies go through a *mover*: a Triton kernel on CUDA, :func:`move_by_index` where there is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from vtoken.kv_pages import LayerFamily, PagedKV, families

Mover: TypeAlias = Callable[[LayerFamily, torch.Tensor, torch.Tensor], None]
"""Copies tokens ``src[i]`` to ``dst[i]`` (int64 ``[n]``, n > 0, disjoint) in a family's layers."""

_STAGING_BYTES = 16 * 2**20
"""Most bytes that a gather holds at once, so that a large plan cannot spike memory at peak load."""


def move_by_index(family: LayerFamily, src: torch.Tensor, dst: torch.Tensor) -> None:
    """The mover in plain torch: any device, any layout, one gather and one scatter per layer."""
    step = max(1, _STAGING_BYTES // family.layers[0].bytes_per_token)
    for layer in family.layers:
        for part_src, part_dst in zip(src.split(step), dst.split(step), strict=True):
            layer.scatter(part_dst, layer.gather(part_src))


class PagedPool:
    """All layers' caches, addressed by slot; what copy engine and verification ask for.

    Attributes:
        layers: in the order of the model.
        num_slots: slots that every layer has.
        bytes_per_token: over all layers.
        device: of the caches.
    """

    def __init__(self, layers: Sequence[PagedKV], mover: Mover = move_by_index) -> None:
        assert layers, "a KV pool needs at least one layer"
        self._families = families(layers)
        self.layers = tuple(layers)
        self._mover = mover
        self.num_slots = min(layer.num_slots for layer in layers)
        self.bytes_per_token = sum(layer.bytes_per_token for layer in layers)
        self.device = layers[0].cache.device

    def copy(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> int:
        """Copy tokens slot by slot in all layers; both int64 ``[n]`` on the device, disjoint.

        On CUDA this only queues work on the current stream.

        Returns:
            Bytes written (or to be written).
        """
        if len(src_slots):
            for family in self._families:
                self._mover(family, src_slots, dst_slots)
        return len(src_slots) * self.bytes_per_token

    def digest(self, slots: torch.Tensor) -> str:
        """BLAKE2b over the K/V bytes of ``slots`` (int64 ``[n]``), in order, over all layers.

        Depends on contents and order only. Waits for the device: for verification, not for the
        hot path.
        """
        slots = slots.to(self.device)
        hasher = hashlib.blake2b(digest_size=16)
        for layer in self.layers:
            step = max(1, _STAGING_BYTES // layer.bytes_per_token)
            for part in slots.split(step):
                hasher.update(layer.gather(part).cpu().view(torch.uint8).numpy().data)
        return hasher.hexdigest()
