"""FLASHINFER over live tokens: its native kernels, for which pages of one token are ordinary.

Its XQA and TensorRT-LLM kernels read larger pages only; the engine is told not to use them
(``use_trtllm_attention=False``). The native kernels are planned on the host, from the live
lengths that :class:`~vtoken.integration.vllm.attention_gpu.LiveTables` puts where vLLM's builder
looks for exact ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_gpu import LiveBackend, LiveBuilder, LiveImpl


class LiveFlashInferBuilder(LiveBuilder, FlashInferMetadataBuilder):
    """The per-step part.

    Raises:
        UnsupportedError: vLLM chose a kernel that reads larger pages.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kernel = self.flashinfer_trtllm_api_decode_kernel
        if self.use_trtllm_decode_attention or kernel is not None:
            raise UnsupportedError(
                f"FlashInfer's {kernel} kernel cannot read pages of one token: set "
                "--attention-config.use_trtllm_attention=false"
            )


class LiveFlashInferImpl(LiveImpl, FlashInferImpl):
    """The per-layer part."""


class LiveFlashInferBackend(LiveBackend, FlashInferBackend):
    """fp8 over one-token pages is not among what was proven."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[LiveFlashInferImpl]:
        """See :class:`LiveFlashInferImpl`."""
        return LiveFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[LiveFlashInferBuilder]:
        """See :class:`LiveFlashInferBuilder`."""
        return LiveFlashInferBuilder
