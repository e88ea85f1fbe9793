"""Attention mass from a paged cache: what observed queries give to each live token.

The meaning is :func:`vtoken.scores.attention_mass`; here keys are found through rows of slots.
On CUDA a kernel does it without gathering keys: :mod:`vtoken.gpu_scores.triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from vtoken.kv_pages import PagedKV
from vtoken.scores import attention_mass


@dataclass(frozen=True, eq=False)
class ObservedQueries:
    """Requests with equally many observed queries; all tensors on the cache's device.

    Attributes:
        places: int64 ``[n, q]`` of the queries among the step's tokens.
        table: int32 ``[max_rows, row_width]`` canonical slots, logical order.
        rows: int64 ``[n]`` of the table.
        lens: int64 ``[n, q]``: a query reads the first so many slots of its row, at least 1.
        width: the largest of ``lens``, known to the host.
    """

    places: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    width: int


Scorer: TypeAlias = Callable[[torch.Tensor, PagedKV, ObservedQueries, float, float], torch.Tensor]
"""``(query, cache, observed, scale, soft_cap)`` → float32 ``[n, q, width]``, the caller's own.

``query`` is ``[num_tokens, num_heads, head_size]``; what a soft cap of 0 and the result mean, and
what it sums to, is :func:`~vtoken.scores.attention_mass`'s.
"""


def mass_by_index(
    query: torch.Tensor,
    cache: PagedKV,
    observed: ObservedQueries,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """The :data:`Scorer` in plain torch: any device; gathers the keys of all rows."""
    slots = observed.table[observed.rows, : observed.width].long()
    blocks, offsets = cache.locate(slots)
    key = cache.key[blocks, :, offsets].transpose(1, 2).contiguous()
    return attention_mass(
        query[observed.places], key, observed.lens, scale=scale, soft_cap=soft_cap
    )


def choose_scorer(device: torch.device) -> Scorer:
    """The Triton kernel on CUDA, otherwise torch."""
    if device.type != "cuda":
        return mass_by_index
    from vtoken.gpu_scores.triton_kernels import mass_by_kernel

    return mass_by_kernel
