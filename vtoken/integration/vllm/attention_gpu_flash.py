"""FLASH_ATTN over live tokens: FlashAttention 3 on Hopper and 4 on Blackwell.

Version 2, on older GPUs, reads pages of 16 tokens or more: it is refused before it gets here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vtoken.integration.vllm.attention_gpu import LiveBackend, LiveBuilder, LiveImpl


class LiveFlashBuilder(LiveBuilder, FlashAttentionMetadataBuilder):
    """The per-step part."""


class LiveFlashImpl(LiveImpl, FlashAttentionImpl):
    """The per-layer part."""


class LiveFlashBackend(LiveBackend, FlashAttentionBackend):
    """fp8 over one-token pages is not among what was proven."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[LiveFlashImpl]:
        """See :class:`LiveFlashImpl`."""
        return LiveFlashImpl

    @staticmethod
    def get_builder_cls() -> type[LiveFlashBuilder]:
        """See :class:`LiveFlashBuilder`."""
        return LiveFlashBuilder
