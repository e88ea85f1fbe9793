"""What the token layer takes on a GPU beside the KV pool, for ``vtoken-serve size``.

The worker computes the same from its own tensors (``GpuTokenLayer.buffer_bytes``), but needs torch
and a model for it; a test holds both together. docs/gpu.md explains the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_BYTES = 2 * 4
"""Of a column, a token in the longest row of a request: vLLM's page table and the worker's rows."""

SCORE_BYTES = 3 * 4 + 8
"""Of a column: what is accumulated for policies that go by attention."""

WORK_BYTES = 128 << 20
"""Scoring and gathering, a part at a time."""

NUM_SAMPLED_LAYERS = 4


@dataclass(frozen=True)
class Limits:
    """vLLM's limits that decide how much it is.

    Attributes:
        max_model_len: tokens of a request.
        max_num_seqs: requests at once.
        max_num_batched_tokens: tokens of a step.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def default_limits(max_model_len: int, memory_gib: float, gpu: str | None = None) -> Limits:
    """What vLLM 0.32's server takes on a GPU of that memory unless it is told otherwise."""
    if memory_gib >= 160:
        return Limits(max_model_len, 1024, 16384)
    if memory_gib >= 70 and gpu != "a100":
        return Limits(max_model_len, 1024, 8192)
    return Limits(max_model_len, 256, 2048)


def layer_bytes(
    limits: Limits, block_size: int, num_layers: int, num_heads: int, head_size: int
) -> int:
    """Most device memory that the token layer takes on one GPU, whatever the policies.

    Args:
        limits: of the engine.
        block_size: tokens per block.
        num_layers: of the model.
        num_heads: query heads on this GPU.
        head_size: numbers of one head, of two bytes each.
    """
    columns = limits.max_num_seqs * (limits.max_model_len + 2 * block_size)
    sampled = min(NUM_SAMPLED_LAYERS, num_layers)
    queries = sampled * limits.max_num_batched_tokens * num_heads * head_size * 2
    return columns * (TABLE_BYTES + SCORE_BYTES) + queries + WORK_BYTES
