"""Attention mass on a GPU, in two passes over the keys of live tokens; nothing is gathered.

    pass 1   per query, head and tile of tokens: maximum and sum of exponentials
    (torch)  per query and head: log of the sum over all tiles
    pass 2   per query and tile: exp(logit − log sum), mean over heads

A program of pass 2 owns its tile and adds the heads up in order, so equal rows give equal bits
wherever their tokens lie; atomic adds would not, and victims could differ from run to run.

Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vtoken.gpu_scores.mass import ObservedQueries
from vtoken.kv_pages import PagedKV

_TILE = 64
"""Tokens per program."""


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    query,  # of this token: [HEADS, DIM], contiguous heads
    key,  # of the layer
    tokens,  # [TILE] int64 offsets of the tokens of this tile, in elements
    columns,  # [TILE] places in the row
    length,
    head,
    query_stride,
    head_stride,
    scale,
    soft_cap,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """[GROUP_PADDED, TILE] logits of a KV head's query heads; −inf behind the row's end."""
    group = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    live = columns < length
    q = tl.load(
        query + (head * GROUP + group)[:, None] * query_stride + dim[None, :],
        mask=(group < GROUP)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    k = tl.load(
        key + tokens[None, :] + head * head_stride + dim[:, None],
        mask=live[None, :] & (dim < DIM)[:, None],
        other=0.0,
    ).to(q.dtype)
    logits = tl.dot(q, k, input_precision="ieee") * scale
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) − 1
        logits = soft_cap * (2.0 * tl.sigmoid(2.0 * logits / soft_cap) - 1.0)
    return tl.where(live[None, :], logits, float("-inf"))


@triton.jit
def _mass(  # type: ignore[no-untyped-def]  # parameters are Triton's: pointers and numbers
    query,  # [num_tokens, HEADS * GROUP, DIM]
    key,  # [B, HEADS, PAGE, DIM] by strides
    table,  # [max_rows, row_width] int32
    places,  # [n * q] int64
    rows,  # [n] int64
    lens,  # [n * q] int64
    maxima,  # [n * q, HEADS * GROUP, num_tiles] float32, written by pass 1
    sums,  # likewise
    log_sums,  # [n * q, HEADS * GROUP] float32, read by pass 2
    mass,  # [n * q, width] float32, written by pass 2
    num_queries,
    num_tiles,
    width,
    token_stride,
    query_stride,
    row_stride,
    block_stride,
    head_stride,
    page_stride,
    scale,
    soft_cap,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    STATISTICS: tl.constexpr,  # pass 1, otherwise pass 2
):
    """Program (i, t): query i, tile t."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    length = tl.load(lens + i)
    columns = tile * TILE + tl.arange(0, TILE)
    live = columns < length
    row = tl.load(rows + i // num_queries)
    slots = tl.load(table + row * row_stride + columns, mask=live, other=0).to(tl.int64)
    tokens = (slots // PAGE) * block_stride + (slots % PAGE) * page_stride
    token_query = query + tl.load(places + i) * token_stride
    group = tl.arange(0, GROUP_PADDED)
    total = tl.zeros([TILE], dtype=tl.float32)
    for head in range(HEADS):
        logits = _logits(
            token_query,
            key,
            tokens,
            columns,
            length,
            head,
            query_stride,
            head_stride,
            scale,
            soft_cap,
            GROUP,
            GROUP_PADDED,
            DIM,
            DIM_PADDED,
            CAPPED,
        )
        place = i * (HEADS * GROUP) + head * GROUP + group
        if STATISTICS:
            top = tl.max(logits, 1)
            # A tile behind the row's end has no maximum; 0 keeps −inf − −inf out of it.
            base = tl.where(top == float("-inf"), 0.0, top)
            part = tl.sum(tl.exp(logits - base[:, None]), 1)
            tl.store(maxima + place * num_tiles + tile, top, mask=group < GROUP)
            tl.store(sums + place * num_tiles + tile, part, mask=group < GROUP)
        else:
            log_sum = tl.load(log_sums + place, mask=group < GROUP, other=0.0)
            weights = tl.exp(logits - log_sum[:, None])
            total += tl.sum(tl.where((group < GROUP)[:, None], weights, 0.0), 0)
    if not STATISTICS:
        tl.store(mass + i * width + columns, total / (HEADS * GROUP), mask=columns < width)


def mass_by_kernel(
    query: torch.Tensor,
    cache: PagedKV,
    observed: ObservedQueries,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The :data:`~vtoken.gpu_scores.mass.Scorer` on CUDA: two launches, no host sync."""
    num_rows, num_queries = observed.lens.shape
    total, num_heads = num_rows * num_queries, query.shape[1]
    num_kv_heads, page = cache.cache.shape[1], cache.cache.shape[2]
    group, dim = num_heads // num_kv_heads, query.shape[2]
    num_tiles = triton.cdiv(observed.width, _TILE)
    maxima = torch.empty(total, num_heads, num_tiles, device=query.device)
    sums, log_sums = torch.empty_like(maxima), maxima.new_empty(total, num_heads)
    mass = maxima.new_empty(num_rows, num_queries, observed.width)
    key = cache.key
    block_stride, head_stride, page_stride, _ = key.stride()

    def launch(statistics: bool) -> None:
        _mass[(total, num_tiles)](
            query,
            key,
            observed.table,
            observed.places,
            observed.rows,
            observed.lens,
            maxima,
            sums,
            log_sums,
            mass,
            num_queries,
            num_tiles,
            observed.width,
            query.stride(0),
            query.stride(1),
            observed.table.stride(0),
            block_stride,
            head_stride,
            page_stride,
            scale,
            soft_cap,
            PAGE=page,
            HEADS=num_kv_heads,
            GROUP=group,
            GROUP_PADDED=max(16, triton.next_power_of_2(group)),
            DIM=dim,
            DIM_PADDED=max(16, triton.next_power_of_2(dim)),
            TILE=_TILE,
            CAPPED=soft_cap != 0,
            STATISTICS=statistics,
        )

    launch(statistics=True)
    top = maxima.amax(-1)
    torch.log((sums * torch.exp(maxima - top[..., None])).sum(-1), out=log_sums)
    log_sums += top
    launch(statistics=False)
    return mass
