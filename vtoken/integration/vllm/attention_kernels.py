"""The two ways to compute attention over live slots on CPU, and the choice between them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from vtoken.integration.vllm.attention_metadata import LiveAttentionMetadata
from vtoken.integration.vllm.compat import cpu_ops
from vtoken.kv_view import SplitKV

logger = logging.getLogger(__name__)

OP_HEAD_SIZES = frozenset({64, 96, 128, 256})
"""Head sizes whose decode and extend ops were checked against float64; extend rejects 80, 112."""

_GATHER_BYTES = 64 * 2**20
"""Most bytes of K (and of V) that the gather of one group of decodes may take."""


@dataclass(frozen=True)
class HeadShape:
    """What the kernels need to know of a layer.

    Attributes:
        num_heads, num_kv_heads, head_size: of this rank.
        scale: factor on the logits.
        soft_cap: ``cap * tanh(logits / cap)``; 0 is off.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    soft_cap: float = 0.0


class LiveAttention(Protocol):
    """Attention of one layer in one step."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: SplitKV,
        metadata: LiveAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write ``output``; the new K/V are in the cache already.

        Args:
            query, output: ``[num_tokens, num_heads, head_size]``.
            key, value: this step's, ``[num_tokens, num_kv_heads, head_size]``.
            cache: views of the layer's cache.
            metadata: of the step.
            output: see ``query``.
        """
        ...  # pragma: no cover


class OpAttention:
    """vLLM's CPU ops, for what they were seen to do right, see :func:`choose_attention`."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        cpu_ops.init_cpu_matrix_unit()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: SplitKV,
        metadata: LiveAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """See :meth:`LiveAttention.attend`."""
        live, split = metadata.live, metadata.num_decodes
        if split:
            cpu_ops.decode_attention(
                query[:split],
                cache.key,
                cache.value,
                output[:split],
                metadata.scratch,
                live.table,
                live.rows[:split],
                live.lens[:split],
                scale=self._shape.scale,
            )
        if metadata.max_extend_len:
            cpu_ops.extend_attention(
                query[split:],
                key[split:],
                value[split:],
                output[split:],
                cache.key,
                cache.value,
                live.table,
                live.rows[split:],
                live.lens[split:],
                metadata.extend_lens,
                metadata.extend_starts,
                metadata.max_extend_len,
                scale=self._shape.scale,
            )


class SdpaAttention:
    """Gather live K/V, then torch's attention: any dtype and head size, more memory traffic.

    Query heads that share a KV head are stacked as further queries of it, which spares torch
    the expansion of K and V: ``[num_kv_heads, group * num_queries, head_size]``.
    """

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: SplitKV,
        metadata: LiveAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """See :meth:`LiveAttention.attend`."""
        self._decode(query, cache, metadata, output)
        starts = (metadata.extend_starts + metadata.num_decodes).tolist()
        for i, (start, length) in enumerate(
            zip(starts, metadata.extend_lens.tolist(), strict=True), metadata.num_decodes
        ):
            tokens = slice(start, start + length)
            self._extend(query[tokens], cache, metadata, i, output[tokens])

    def _decode(
        self,
        query: torch.Tensor,
        cache: SplitKV,
        metadata: LiveAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Requests with one query, in groups whose padded K fits ``_GATHER_BYTES``."""
        num_decodes, live = metadata.num_decodes, metadata.live
        if not num_decodes:
            return
        shape = self._shape
        longest = int(live.lens[:num_decodes].max())
        per_request = longest * shape.num_kv_heads * shape.head_size * query.element_size()
        step = max(1, _GATHER_BYTES // per_request)
        for start in range(0, num_decodes, step):
            part = slice(start, min(start + step, num_decodes))
            lens = live.lens[part]
            width = int(lens.max())
            slots = live.table[live.rows[part], :width]
            mask = torch.arange(width) < lens[:, None]
            # What lies behind a row's end is stale and may hold NaN, which a zero weight does
            # not remove: read the first live slot there instead.
            slots = torch.where(mask, slots, slots[:, :1])
            grouped = query[part].view(-1, shape.num_kv_heads, self._group, shape.head_size)
            result = self._masked(grouped, *self._gather(cache, slots), mask[:, None, None, :])
            output[part] = result.reshape(-1, shape.num_heads, shape.head_size)

    def _extend(
        self,
        query: torch.Tensor,
        cache: SplitKV,
        metadata: LiveAttentionMetadata,
        request: int,
        output: torch.Tensor,
    ) -> None:
        """One request with several queries: all earlier live tokens, then causal."""
        shape, live = self._shape, metadata.live
        num_live, num_new = int(live.lens[request]), len(query)
        slots = live.table[live.rows[request], :num_live][None]
        causal = torch.ones(num_new, num_live, dtype=torch.bool).tril(num_live - num_new)
        grouped = query.view(num_new, shape.num_kv_heads, self._group, shape.head_size)
        stacked = grouped.permute(1, 2, 0, 3).reshape(1, shape.num_kv_heads, -1, shape.head_size)
        result = self._masked(stacked, *self._gather(cache, slots), causal.repeat(self._group, 1))
        unstacked = result.view(shape.num_kv_heads, self._group, num_new, shape.head_size)
        output.copy_(unstacked.permute(2, 0, 1, 3).reshape(output.shape))

    def _gather(self, cache: SplitKV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``slots`` ``[n, width]``: ``[n, num_kv_heads, width, head_size]`` each."""
        flat = slots.reshape(-1).to(torch.int64)
        size = (*slots.shape, self._shape.num_kv_heads, self._shape.head_size)
        key = cache.key.index_select(0, flat).view(size).transpose(1, 2)
        value = cache.value.index_select(0, flat).view(size).transpose(1, 2)
        return key, value

    def _masked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Softmax attention; ``mask`` is True where a query may read."""
        scale, soft_cap = self._shape.scale, self._shape.soft_cap
        if not soft_cap:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale
            )
        logits = query.float() @ key.float().transpose(-1, -2) * scale
        capped = soft_cap * torch.tanh(logits / soft_cap)
        weights = capped.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ value.float()).to(query.dtype)


def choose_attention(shape: HeadShape, dtype: torch.dtype) -> LiveAttention:
    """The ops where they are known to be right, otherwise gather and SDPA; logs the reason."""
    reason = _why_not_ops(shape, dtype)
    if reason is None:
        return OpAttention(shape)
    _log_once(reason)
    return SdpaAttention(shape)


def _why_not_ops(shape: HeadShape, dtype: torch.dtype) -> str | None:
    if not cpu_ops.has_slot_attention_ops():
        return "this build of vLLM has no slot attention ops"
    if dtype != torch.bfloat16:
        # float32 is not implemented; float16 extend is wrong with AMX and missing without.
        return f"the slot attention ops serve bfloat16, not {dtype}"
    if shape.soft_cap:
        # Measured: capped decode is right, capped extend is off by the size of the values.
        return f"the slot attention ops are wrong with a logit soft cap, here {shape.soft_cap}"
    if shape.head_size not in OP_HEAD_SIZES:
        sizes = ", ".join(map(str, sorted(OP_HEAD_SIZES)))
        return f"the slot attention ops serve head sizes {sizes}, not {shape.head_size}"
    return None


_logged: set[str] = set()


def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        logger.warning("attention falls back to gather and SDPA, which is slower: %s", reason)
