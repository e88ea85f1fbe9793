"""TRITON_ATTN over live tokens: vLLM's unified attention kernel, on any GPU from Ampere on."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vtoken.integration.vllm.attention_gpu import LiveBackend, LiveBuilder, LiveImpl


class LiveTritonBuilder(LiveBuilder, TritonAttentionMetadataBuilder):
    """The per-step part."""


class LiveTritonImpl(LiveImpl, TritonAttentionImpl):
    """The per-layer part."""


class LiveTritonBackend(LiveBackend, TritonAttentionBackend):
    """Per-token scales of a quantised cache are not among what was proven."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_impl_cls() -> type[LiveTritonImpl]:
        """See :class:`LiveTritonImpl`."""
        return LiveTritonImpl

    @staticmethod
    def get_builder_cls() -> type[LiveTritonBuilder]:
        """See :class:`LiveTritonBuilder`."""
        return LiveTritonBuilder
