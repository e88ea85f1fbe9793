"""Slot-addressed views of the KV cache as vLLM's GPU runners allocate it, in any layout.

vLLM binds every layer a ``[B, H, N, C]`` view (blocks, KV heads, tokens per block, content: a
key followed by its value) of one allocation. The order in memory is one of six, named by the
axes from the outside in, L being the layer::

    LBNHC  LBHNC             a block of a layer is one piece
    LHBNC                    a head of a layer is one piece
    BLNHC  BLHNC  BHLNC      a block holds all layers

Nothing here depends on which: a token is ``H`` runs of ``C`` numbers, and strides say where.
With kernel blocks of one token, which vLLM makes for the first two only, ``N`` is 1, ``B`` counts
tokens, and the runs of a token follow each other.

    slot s ─▶ block b = s // N, offset o = s % N ─▶ run h at b·stride(0) + h·stride(1) + o·stride(2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtoken.errors import UnsupportedError

WORD_BYTES = 4
"""Copies move words of this size: exact for every dtype, and what vLLM's pages align to."""


@dataclass(frozen=True, eq=False)
class PagedKV:
    """One layer's cache; shares its memory, nothing is copied.

    Attributes:
        cache: ``[B, H, N, C]`` as bound to the layer.
        words: the same bytes as int32, ``[B, H, N, C * itemsize / 4]``.
    """

    cache: torch.Tensor
    words: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Tokens that the layer has room for."""
        num_slots: int = self.cache.shape[0] * self.cache.shape[2]
        return num_slots

    @property
    def bytes_per_token(self) -> int:
        """K/V bytes of one token in this layer."""
        num_words: int = self.words.shape[1] * self.words.shape[3]
        return num_words * WORD_BYTES

    @property
    def key(self) -> torch.Tensor:
        """Keys, ``[B, H, N, C / 2]``."""
        return self.cache[..., : self.cache.shape[3] // 2]

    @property
    def value(self) -> torch.Tensor:
        """Values, ``[B, H, N, C / 2]``."""
        return self.cache[..., self.cache.shape[3] // 2 :]

    @classmethod
    def from_cache(cls, cache: torch.Tensor) -> PagedKV:
        """View ``cache`` ``[B, H, N, C]``, any strides but that ``C`` is contiguous.

        Raises:
            UnsupportedError: another shape, or runs that are not whole aligned 32-bit words.
        """
        if cache.dim() != 4 or cache.stride(3) != 1 or cache.shape[3] % 2:
            raise UnsupportedError(
                "a paged KV cache must be a [blocks, heads, tokens, key + value] tensor with "
                f"contiguous content, got shape {tuple(cache.shape)}, strides {cache.stride()}"
            )
        size = cache.element_size()
        places = (cache.storage_offset(), cache.shape[3], *cache.stride()[:3])
        if any(place * size % WORD_BYTES for place in places):
            raise UnsupportedError(
                f"tokens of {cache.shape[3]} numbers of {size} bytes, strides {cache.stride()}, "
                f"are not whole {WORD_BYTES}-byte words"
            )
        return cls(cache, cache.view(torch.int32))

    def locate(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each slot, int64 like ``slots``."""
        page = self.cache.shape[2]
        return slots // page, slots % page

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Words of ``slots`` (int64 ``[n]``, on the cache's device): a copy ``[n, H, W]``."""
        blocks, offsets = self.locate(slots)
        return self.words[blocks, :, offsets]

    def scatter(self, slots: torch.Tensor, words: torch.Tensor) -> None:
        """Write ``words`` ``[n, H, W]`` to ``slots``, in place."""
        blocks, offsets = self.locate(slots)
        self.words[blocks, :, offsets] = words


@dataclass(frozen=True, eq=False)
class LayerFamily:
    """Layers of equal shape and strides: one kernel serves them, given where each begins.

    Attributes:
        layers: in the order of the model.
        addresses: int64 ``[len(layers)]`` on their device, byte address of each layer.
    """

    layers: tuple[PagedKV, ...]
    addresses: torch.Tensor

    @property
    def words(self) -> torch.Tensor:
        """The first layer's words, for shape and strides."""
        return self.layers[0].words


def families(layers: Sequence[PagedKV]) -> list[LayerFamily]:
    """Group ``layers`` by what a kernel must know of them."""
    groups: dict[tuple[object, ...], list[PagedKV]] = {}
    for layer in layers:
        words = layer.words
        groups.setdefault((words.shape, words.stride(), words.device), []).append(layer)
    found = []
    for group in groups.values():
        addresses = [layer.words.data_ptr() for layer in group]
        device = group[0].words.device
        tensor = torch.tensor(addresses, dtype=torch.int64, device=device)
        found.append(LayerFamily(tuple(group), tensor))
    return found
