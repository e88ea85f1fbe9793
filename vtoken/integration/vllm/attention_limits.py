"""What rows of live tokens cannot express, on CPU and on GPUs alike."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionType

from vtoken.errors import UnsupportedError


class LiveTokensOnly:
    """Mixed into a backend: it reads what decoder layers have computed so far."""

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No: a row lists a past."""
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """No: a window counts positions, a row counts live tokens."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder layers only."""
        return bool(attn_type == AttentionType.DECODER)


def check_layer(
    device: str,
    *,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    sinks: Any,
    further: dict[str, bool],
) -> None:
    """Refuse a layer; the arguments are those of vLLM's attention implementations.

    Args:
        device: for the message: ``CPU`` or ``GPUs``.
        further: what else may be asked for, and whether it is.

    Raises:
        UnsupportedError: with the first feature that is asked for and cannot be served.
    """
    refused = {
        "ALiBi": alibi_slopes is not None,
        f"a sliding window of {sliding_window}": sliding_window is not None,
        f"attention type {attn_type}": attn_type != AttentionType.DECODER,
        f"KV sharing with {kv_sharing_target_layer_name}": bool(kv_sharing_target_layer_name),
        "learned attention sinks": sinks is not None,
    } | further
    for feature, present in refused.items():
        if present:
            raise UnsupportedError(f"vToken on {device} does not support {feature}")
