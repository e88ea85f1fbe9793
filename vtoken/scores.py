"""The arithmetic of signals: pure functions of queries, keys and values.

No state, no cache layout, no vLLM: a GPU kernel is written as the twin of these functions and
compared with them, as they are compared with a float64 reference. Everything is float32 inside,
whatever the dtype of the cache.
"""

from __future__ import annotations

import torch


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """How much attention each key gets from each query: softmax weights, mean over heads.

    Query head ``h`` reads KV head ``h // (num_heads / num_kv_heads)``, as everywhere in vLLM.

    Args:
        query: ``[n, q, num_heads, head_size]``.
        key: ``[n, num_kv_heads, width, head_size]``; anything, NaN too, from ``lens`` on.
        lens: int64 ``[n, q]``: query ``(i, j)`` reads the first ``lens[i, j]`` keys.
        scale: factor on the logits.
        soft_cap: ``cap * tanh(logits / cap)``; 0 is off.

    Returns:
        float32 ``[n, q, width]``; each ``[i, j]`` sums to 1 and is 0 from ``lens[i, j]`` on.
    """
    n, num_queries, num_heads, head_size = query.shape
    num_kv_heads, width = key.shape[1], key.shape[2]
    group = num_heads // num_kv_heads
    grouped = query.float().view(n, num_queries, num_kv_heads, group, head_size)
    # Heads that share a KV head become further queries of it.
    stacked = grouped.permute(0, 2, 1, 3, 4).reshape(n * num_kv_heads, -1, head_size)
    logits = torch.bmm(stacked * scale, key.float().view(n * num_kv_heads, width, -1).mT)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.view(n, num_kv_heads, num_queries, group, width)
    hidden = torch.arange(width, device=key.device) >= lens[:, None, :, None, None]
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1).mean(dim=(1, 3))


def key_norms(key: torch.Tensor) -> torch.Tensor:
    """L2 norm of each key, mean over heads: ``[num_kv_heads, m, head_size]`` → float32 ``[m]``."""
    return key.float().norm(dim=-1).mean(dim=0)


def unit_key_sum(key: torch.Tensor) -> torch.Tensor:
    """Sum of the keys, each as a unit vector: shape as above → float32
    ``[num_kv_heads, 1, head_size]``."""
    return _unit(key).sum(dim=1, keepdim=True)


def key_redundancy(
    key: torch.Tensor, unit_sum: torch.Tensor | None = None, num_keys: int = 0
) -> torch.Tensor:
    """Mean cosine of each key with all other keys, mean over heads; shapes as above.

    The mean of cosines is one product with the sum of the unit keys: O(m), not O(m²).

    Args:
        key: all keys, or a part of them.
        unit_sum: :func:`unit_key_sum` of all of them; None: ``key`` is all.
        num_keys: how many ``unit_sum`` is of.
    """
    unit = _unit(key)
    if unit_sum is None:
        unit_sum, num_keys = unit.sum(dim=1, keepdim=True), key.shape[1]
    with_all = (unit * unit_sum).sum(-1)
    with_itself = (unit * unit).sum(-1)
    return ((with_all - with_itself) / max(1, num_keys - 1)).mean(dim=0)


def _unit(key: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(key.float(), dim=-1)


def value_key_ratio(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """L2 norm of each value over that of its key, mean over heads; shapes as above."""
    return (value.float().norm(dim=-1) / key.float().norm(dim=-1).clamp_min(1e-6)).mean(dim=0)
