"""vLLM's CPU attention ops that read K/V through a list of slots per request."""

from __future__ import annotations

import torch

# Importing it loads the extension that fits this CPU and registers torch.ops._C.
import vllm._custom_ops  # noqa: F401


def has_slot_attention_ops() -> bool:
    """Whether this build of vLLM's CPU extension has both ops."""
    ops = torch.ops._C
    return hasattr(ops, "decode_attention_cpu") and hasattr(ops, "extend_attention_cpu")


def init_cpu_matrix_unit() -> None:
    """Ask the kernel for the AMX tiles; the ops use them without asking first."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scratch: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
) -> None:
    """One query per request over its live slots; writes ``output``.

    Args:
        query, output: ``[num_reqs, num_heads, head_size]``.
        key, value: ``[kernel_slots, num_kv_heads, head_size]`` views of the cache.
        scratch: ``[num_reqs, num_heads, num_splits, head_size + 1]`` float32; its third size
            fixes how the sum over tokens is split, and with it the rounding.
        slot_table: ``[max_num_reqs, width]`` int32 kernel slots.
        rows, lens: int64 ``[num_reqs]``: row of ``slot_table`` and live tokens per request.
        scale: factor on the logits.
    """
    torch.ops._C.decode_attention_cpu(
        query,
        key,
        value,
        output,
        None,  # key, value, loc: the new token is in the cache already
        None,
        None,
        scratch,
        slot_table,
        rows,
        lens,
        scale,
        0.0,  # logit_cap: the extend op gets it wrong
        False,  # is_cross_attn
        -1,  # sliding_window_size: none
        None,  # encoder_lens
        None,  # sinks
    )


def extend_attention(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    output: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    extend_lens: torch.Tensor,
    extend_starts: torch.Tensor,
    max_extend_len: int,
    *,
    scale: float,
) -> None:
    """Several queries per request: all earlier live slots, then the new tokens causally.

    Args:
        query, output: ``[num_tokens, num_heads, head_size]``, requests one after the other.
        new_key, new_value: ``[num_tokens, num_kv_heads, head_size]``, this step's tokens; they
            are read from here, not from the cache.
        key, value, slot_table, rows, lens, scale: as in :func:`decode_attention`;
            ``lens`` counts the new tokens too.
        extend_lens, extend_starts: int32 ``[num_reqs]``: new tokens and first token per request.
        max_extend_len: the largest of ``extend_lens``.
    """
    torch.ops._C.extend_attention_cpu(
        query,
        new_key,
        new_value,
        output,
        key,
        value,
        slot_table,
        rows,
        lens,
        extend_lens,
        extend_starts,
        max_extend_len,
        scale,
        0.0,  # logit_cap: the extend op gets it wrong
        False,  # is_cross_attn
        -1,  # sliding_window_size: none
        None,  # encoder_lens
        None,  # sinks
    )
