"""vLLM's private names on the GPU path: kernel block tables, metadata, what a GPU can run.

Read against vLLM 0.32.0: ``v1/worker/utils.py`` (AttentionGroup), ``v1/attention/backend.py``,
``v1/attention/backends/fa_utils.py``, ``utils/flashinfer.py``, ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import AttentionGroup

from vtoken.errors import UnsupportedError


class _LiveGroup(AttentionGroup):
    """A group whose kernel block table is written by us, not mapped from positional blocks."""

    def _with_kernel_block_table(
        self, common_attn_metadata: CommonAttentionMetadata, ubatch_idx: int = 0
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class HookedGPUWorker(Worker):
    """vLLM's GPU worker, asking for its runner in public."""

    def make_runner(self) -> Any:
        """The model runner, once the device is set up."""
        raise NotImplementedError

    def _make_model_runner(self) -> Any:
        return self.make_runner()


def take_kernel_block_table(group: AttentionGroup) -> torch.Tensor:
    """Make ``group``'s persistent kernel block table ours; vLLM stops writing to it.

    Returns:
        ``[max_num_seqs, width]`` int32, one entry per token; CUDA graphs capture its address.

    Raises:
        UnsupportedError: the group's kernels do not read blocks of one token, or it has a table
            per micro-batch.
    """
    if group.kernel_block_size != 1:
        raise UnsupportedError(
            f"{group.backend.get_name()} reads blocks of {group.kernel_block_size or 'whole'} "
            "tokens, live tokens need blocks of 1"
        )
    tables = group.kernel_block_table
    if len(tables) != 1:
        raise UnsupportedError(f"{len(tables)} micro-batches, live tokens need 1")
    group.__class__ = _LiveGroup
    table: torch.Tensor = tables[0]
    return table


def flash_attn_version(head_size: int) -> int | None:
    """The FlashAttention that vLLM takes on this GPU for heads of that size, None without one."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    except ImportError:
        return None
    version: int | None = get_flash_attn_version(head_size=head_size)
    return version


def has_flashinfer() -> bool:
    """Whether FlashInfer is installed and can compile its kernels, as vLLM sees it."""
    from vllm.utils import flashinfer

    return bool(flashinfer.has_flashinfer())


def fp8_scales(layer: Any) -> tuple[float, float]:
    """What keys and values of an fp8 cache are multiplied with."""
    return float(layer._k_scale_float), float(layer._v_scale_float)


def fp8_logit_scale(layer: Any) -> float:
    """What logits of an fp8 cache are multiplied with: keys, and queries that vLLM quantised."""
    scale = float(layer._k_scale_float)
    if getattr(layer, "query_quant", None) is not None:
        scale *= float(layer._q_scale_float)
    return scale


def with_live_tokens(
    common: CommonAttentionMetadata,
    table: torch.Tensor,
    lens: torch.Tensor,
    lens_cpu: torch.Tensor,
    max_len: int,
) -> CommonAttentionMetadata:
    """``common`` with live tokens instead of positions; what counts queries stays.

    Args:
        common: of the batch; not changed.
        table: int32 ``[num_reqs, width]`` slots.
        lens, lens_cpu: int32 ``[num_reqs]`` live tokens, on the device and on the host.
        max_len: the largest of them, or more.
    """
    return replace(
        common,
        block_table_tensor=table,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens_cpu,
        max_seq_len=max_len,
        _num_computed_tokens_cache=None,
    )
