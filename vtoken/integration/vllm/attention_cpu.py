"""Attention backend of the V1 runner on CPU: reads live tokens only, in logical order.

It stands in for vLLM's CPU_ATTN while our runner loads its model. The cache keeps vLLM's own
storage; this step's K/V are written through the ``[rows, D]`` view with indices computed once
per step, then the kernels read the slots listed in the request's row.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_kernels import HeadShape, choose_attention
from vtoken.integration.vllm.attention_limits import LiveTokensOnly, check_layer
from vtoken.integration.vllm.attention_metadata import (
    LiveAttentionMetadata,
    LiveRows,
    make_metadata,
    positional_rows,
)
from vtoken.integration.vllm.observer import LayerObserver
from vtoken.kv_view import SlotGeometry, SplitKV


class LiveCPUAttentionBackend(LiveTokensOnly, CPUAttentionBackend):
    """Dtypes, head sizes and storage layout of the stock backend; any block size."""

    forward_includes_kv_cache_update: bool = False
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Slots make block boundaries invisible to the kernels."""
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> type[LiveCPUAttention]:
        """The per-layer part."""
        return LiveCPUAttention

    @staticmethod
    def get_builder_cls() -> type[LiveCPUMetadataBuilder]:
        """The per-step part."""
        return LiveCPUMetadataBuilder


class LiveCPUMetadataBuilder(AttentionMetadataBuilder[LiveAttentionMetadata]):
    """Builds the metadata of a step from the rows that the runner hands in before it."""

    # Decodes first: they are served by another op than the rest.
    reorder_batch_threshold: int = 1

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.geometry = SlotGeometry(
            kv_cache_spec.block_size, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size
        )
        self._num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._live: LiveRows | None = None
        self._observer: LayerObserver | None = None

    def set_live_rows(self, live: LiveRows, observer: LayerObserver | None = None) -> None:
        """Rows and observer of the next :meth:`build`; that one consumes them."""
        self._live = live
        self._observer = observer

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LiveAttentionMetadata:
        """Metadata of one step; without rows (dummy runs) every position counts as live."""
        common = common_attn_metadata
        num_reqs = common.num_reqs
        # Taken, not kept: a later dummy run must not read through an old batch's rows.
        live, self._live = self._live, None
        observer, self._observer = self._observer, None
        if live is None:
            num_blocks = -(-common.max_seq_len // self.geometry.block_size)
            blocks = common.block_table_tensor[:num_reqs, :num_blocks]
            live = positional_rows(self.geometry, blocks, common.seq_lens[:num_reqs])
        return make_metadata(
            self.geometry,
            self._num_heads,
            live,
            common.query_start_loc_cpu[: num_reqs + 1],
            common.slot_mapping[: common.num_actual_tokens],
            observer,
        )


class LiveCPUAttention(AttentionImpl[LiveAttentionMetadata]):
    """One layer's attention over live slots.

    Raises:
        UnsupportedError: the layer needs what rows of live tokens cannot express.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        check_layer(
            "CPU",
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
            further={
                f"KV cache dtype {kv_cache_dtype}": kv_cache_dtype.startswith(
                    ("fp8", "int8", "nvfp4")
                )
            },
        )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        # The model's dtype is torch's default while vLLM builds its layers.
        self._attention = choose_attention(
            HeadShape(num_heads, self.num_kv_heads, head_size, self.scale, self.soft_cap),
            torch.get_default_dtype(),
        )
        self._cache: tuple[torch.Tensor, SplitKV] | None = None

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K/V ``[num_tokens, num_kv_heads, head_size]`` into the cache."""
        per_layer = get_forward_context().attn_metadata
        metadata = per_layer[layer.layer_name] if isinstance(per_layer, dict) else None
        if metadata is None or metadata.key_rows is None:
            return  # a dummy run, whose slot mapping is all padding
        rows, num_tokens = self._views(kv_cache).rows, metadata.num_tokens
        rows.index_copy_(0, metadata.key_rows, key[:num_tokens].reshape(-1, self.head_size))
        rows.index_copy_(0, metadata.value_rows, value[:num_tokens].reshape(-1, self.head_size))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LiveAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``output`` ``[num_tokens, num_heads, head_size]`` and return it.

        Shapes as in :class:`~vtoken.integration.vllm.attention_kernels.LiveAttention`; tensors
        may be padded behind the step's tokens.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("vToken on CPU does not support fused output quantization")
        if attn_metadata is None:
            return output  # profiling, before there is a cache
        num_tokens = attn_metadata.num_tokens
        self._attention.attend(
            query[:num_tokens],
            key[:num_tokens],
            value[:num_tokens],
            self._views(kv_cache),
            attn_metadata,
            output[:num_tokens],
        )
        if attn_metadata.observer is not None:
            attn_metadata.observer.observe(
                layer.layer_name,
                query,
                self._views(kv_cache),
                scale=self.scale,
                soft_cap=self.soft_cap,
            )
        return output

    def _views(self, kv_cache: torch.Tensor) -> SplitKV:
        if self._cache is None or self._cache[0] is not kv_cache:
            self._cache = (kv_cache, SplitKV.from_cache(kv_cache))
        return self._cache[1]
