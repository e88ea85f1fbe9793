"""What the attention of one step needs to know, computed once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken.integration.vllm.observer import LayerObserver
from vtoken.kv_view import SlotGeometry

NUM_DECODE_SPLITS = 8
"""Parts into which the decode op cuts a request's tokens. Fixed: the cut changes the rounding,
and a number that followed the batch would make a request's bits depend on its neighbours."""


@dataclass(frozen=True, eq=False)
class LiveRows:
    """The rows of one batch, in the batch's order.

    Attributes:
        table: ``[max_num_reqs, width]`` int32 kernel slots, logical order.
        rows, lens: int64 ``[num_reqs]``: row of ``table``, live tokens (this step's included).
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True, eq=False)
class LiveAttentionMetadata:
    """One step's attention: first ``num_decodes`` requests with one token each, then the rest.

    Attributes:
        num_tokens: new tokens of the step, without padding.
        num_decodes: leading requests with exactly one new token.
        live: rows of all requests.
        extend_lens, extend_starts: int32, of the other requests: new tokens, and the first
            one's index counted from token ``num_decodes``.
        max_extend_len: the largest of ``extend_lens``, 0 if there are none.
        key_rows, value_rows: int64 ``[num_tokens * H]``, where to write the new K and V, or
            None in a dummy run, which has no slots of its own.
        scratch: ``[num_decodes, num_heads, NUM_DECODE_SPLITS, head_size + 1]`` float32.
        observer: whom layers show their queries, or None in most steps.
    """

    num_tokens: int
    num_decodes: int
    live: LiveRows
    extend_lens: torch.Tensor
    extend_starts: torch.Tensor
    max_extend_len: int
    key_rows: torch.Tensor | None
    value_rows: torch.Tensor | None
    scratch: torch.Tensor
    observer: LayerObserver | None = None


def make_metadata(
    geometry: SlotGeometry,
    num_heads: int,
    live: LiveRows,
    query_starts: torch.Tensor,
    slot_mapping: torch.Tensor,
    observer: LayerObserver | None = None,
) -> LiveAttentionMetadata:
    """Metadata of one step.

    Args:
        geometry: of the layers' cache.
        num_heads: query heads of this rank.
        live: rows of the batch.
        query_starts: int32 ``[num_reqs + 1]``, first new token of each request.
        slot_mapping: int64 ``[num_tokens]`` canonical slots to write; negative in dummy runs.
        observer: see :class:`LiveAttentionMetadata`.
    """
    query_lens = query_starts[1:] - query_starts[:-1]
    num_decodes = _leading_ones(query_lens)
    extend_lens = query_lens[num_decodes:].contiguous()
    key_rows = value_rows = None
    if len(slot_mapping) and int(slot_mapping.min()) >= 0:
        key_rows = geometry.key_rows(slot_mapping)
        value_rows = key_rows + geometry.block_size
    return LiveAttentionMetadata(
        num_tokens=len(slot_mapping),
        num_decodes=num_decodes,
        live=live,
        extend_lens=extend_lens,
        extend_starts=(query_starts[num_decodes:-1] - num_decodes).contiguous(),
        max_extend_len=int(extend_lens.max()) if len(extend_lens) else 0,
        key_rows=key_rows,
        value_rows=value_rows,
        scratch=torch.empty(
            num_decodes, num_heads, NUM_DECODE_SPLITS, geometry.head_size + 1, dtype=torch.float32
        ),
        observer=observer,
    )


def positional_rows(
    geometry: SlotGeometry, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> LiveRows:
    """Rows in which every token is live, straight from a block table (dummy runs).

    Args:
        geometry: of the layers' cache.
        block_table: int32 ``[num_reqs, max_num_blocks]``.
        seq_lens: tokens per request, ``[num_reqs]``.
    """
    offsets = torch.arange(geometry.block_size, dtype=torch.int32)
    slots = block_table[:, :, None] * geometry.rows_per_block + offsets
    table = slots.reshape(len(block_table), -1).to(torch.int32).contiguous()
    return LiveRows(table, torch.arange(len(block_table)), seq_lens.to(torch.int64))


def _leading_ones(query_lens: torch.Tensor) -> int:
    # Only a leading run: vLLM sorts one-token prompts behind longer prefills, and those must
    # stay in their place among the extends.
    longer = (query_lens > 1).nonzero()
    return int(longer[0]) if len(longer) else len(query_lens)
