"""Stock attention kernels on pages of one token against pages of 16: right, and how fast."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.report import Row, failed
from vtoken.device_check import dense_attention

SECTION = "attention"
TOLERANCE = 0.02
"""Largest error of a bf16 output over unit-normal values against float32."""


@dataclass(frozen=True, eq=False)
class Decode:
    """A decode batch over one cache: scattered one-token pages, and the same tokens compacted.

    Attributes:
        query: ``[num_reqs, num_heads, head_size]``.
        scattered, compacted: ``[pages, page, num_kv_heads, 2 * head_size]``.
        slots, blocks: int32 ``[num_reqs, …]`` page tables of these two.
        num_live: tokens of every request.
    """

    query: torch.Tensor
    scattered: torch.Tensor
    compacted: torch.Tensor
    slots: torch.Tensor
    blocks: torch.Tensor
    num_live: int

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float(self.query.shape[2] ** -0.5)

    def split(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a cache."""
        key, value = cache.split(self.query.shape[2], dim=-1)
        return key, value


Kernel = Callable[[Decode, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
"""``(batch, key, value, table)`` → what computes the output; planning happens before it."""


def make_decode(machine: Machine) -> Decode:
    """Half of the slots hold live tokens, in random places; the others are NaN."""
    sizes, device = machine.sizes, machine.device
    total = sizes.num_reqs * sizes.num_live
    width = 2 * sizes.head_size
    kv = torch.randn(total, sizes.num_kv_heads, width, device=device).to(torch.bfloat16)
    order = torch.randperm(2 * total, device=device)[:total]
    scattered = torch.full(
        (2 * total, 1, sizes.num_kv_heads, width), float("nan"), dtype=kv.dtype, device=device
    )
    scattered[order, 0] = kv
    num_blocks = -(-sizes.num_live // 16)
    compacted = torch.zeros(
        sizes.num_reqs, num_blocks * 16, sizes.num_kv_heads, width, dtype=kv.dtype, device=device
    )
    compacted[:, : sizes.num_live] = kv.view(sizes.num_reqs, sizes.num_live, -1, width)
    blocks = torch.arange(sizes.num_reqs * num_blocks, dtype=torch.int32, device=device)
    query = torch.randn(sizes.num_reqs, sizes.num_heads, sizes.head_size, device=device)
    return Decode(
        query.to(torch.bfloat16),
        scattered,
        compacted.view(-1, 16, sizes.num_kv_heads, width),
        order.view(sizes.num_reqs, -1).int(),
        blocks.view(sizes.num_reqs, -1),
        sizes.num_live,
    )


def reference(batch: Decode) -> torch.Tensor:
    """float32 attention, one request at a time."""
    outputs = []
    for query, slots in zip(batch.query, batch.slots, strict=True):
        key, value = batch.split(batch.scattered[slots.long(), 0])
        outputs.append(dense_attention(query[None], key, value, batch.scale))
    return torch.cat(outputs)


def check_attention(machine: Machine, kernels: dict[str, Kernel]) -> Iterator[Row]:
    """Error against float32, and times of both page sizes, per installed kernel."""
    batch = make_decode(machine)
    expected = reference(batch)
    for name, kernel in kernels.items():
        try:
            page_1 = kernel(batch, *batch.split(batch.scattered), batch.slots)
            page_16 = kernel(batch, *batch.split(batch.compacted), batch.blocks)
            error = float((page_1().float() - expected).abs().max())
            same = torch.equal(page_1(), page_16())
        except Exception as problem:  # whatever a kernel library raises is this row's result
            yield failed(SECTION, name, problem)
            continue
        note = "equal bits with page 16" if same else "other bits than page 16"
        yield Row(SECTION, f"{name}: error on pages of 1", error, ok=error < TOLERANCE, note=note)
        ones, sixteens = machine.median_seconds(page_1), machine.median_seconds(page_16)
        yield Row(SECTION, f"{name}: decode on pages of 16", sixteens * 1e6, "µs")
        yield Row(SECTION, f"{name}: decode on pages of 1", ones * 1e6, "µs")
        yield Row(SECTION, f"{name}: pages of 1 cost", ones / sixteens, "times pages of 16")


def triton_kernel(
    batch: Decode, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """vLLM's unified attention."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    num_reqs, num_heads, head_size = batch.query.shape
    device, segments = batch.query.device, 16
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    lens = torch.full((num_reqs,), batch.num_live, dtype=torch.int32, device=device)
    scratch = torch.empty(num_reqs, num_heads, segments, _power_of_2(head_size), device=device)
    statistics = torch.empty(2, num_reqs, num_heads, segments, device=device)
    output = torch.empty_like(batch.query)

    def run() -> torch.Tensor:
        unified_attention(
            q=batch.query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lens,
            max_seqlen_k=batch.num_live,
            softmax_scale=batch.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=num_reqs,
            num_par_softmax_segments=segments,
            softmax_segm_output=scratch,
            softmax_segm_max=statistics[0],
            softmax_segm_expsum=statistics[1],
        )
        return output.clone()

    return run


def flash_kernel(version: int) -> Kernel:
    """vLLM's FlashAttention of a version."""

    def plan(
        batch: Decode, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        num_reqs, device = len(batch.query), batch.query.device
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        lens = torch.full((num_reqs,), batch.num_live, dtype=torch.int32, device=device)

        def run() -> torch.Tensor:
            result: torch.Tensor = flash_attn_varlen_func(
                q=batch.query,
                k=key,
                v=value,
                max_seqlen_q=1,
                cu_seqlens_q=starts,
                max_seqlen_k=batch.num_live,
                seqused_k=lens,
                softmax_scale=batch.scale,
                causal=True,
                block_table=table,
                fa_version=version,
            )
            return result

        return run

    return plan


def flashinfer_kernel(
    batch: Decode, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """FlashInfer's native decode, planned on the host as vLLM does."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    num_reqs, num_heads, head_size = batch.query.shape
    page = key.shape[1]
    num_pages = -(-batch.num_live // page)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=batch.query.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.arange(num_reqs + 1, dtype=torch.int32) * num_pages,
        table[:, :num_pages].reshape(-1),
        torch.full((num_reqs,), (batch.num_live - 1) % page + 1, dtype=torch.int32),
        num_heads,
        key.shape[2],
        head_size,
        page,
        sm_scale=batch.scale,
        q_data_type=batch.query.dtype,
        kv_data_type=key.dtype,
    )
    return lambda: wrapper.run(batch.query, (key, value))


def installed_kernels(capability: tuple[int, int]) -> tuple[dict[str, Kernel], list[Row]]:
    """Kernels that this machine has, and a row for each that it lacks."""
    found: dict[str, Kernel] = {}
    missing: list[Row] = []
    has_vllm = importlib.util.find_spec("vllm") is not None
    has_triton = importlib.util.find_spec("triton") is not None
    if has_vllm and has_triton:
        found["TRITON_ATTN"] = triton_kernel
    else:
        missing.append(Row(SECTION, "TRITON_ATTN", "left out", note="needs vLLM and Triton"))
    version = {9: 3, 10: 4}.get(capability[0])
    if version is None:
        reason = f"FlashAttention 2 on capability {capability[0]}.x reads no pages of 1"
        missing.append(Row(SECTION, "FLASH_ATTN", "left out", note=reason))
    elif has_vllm:
        found[f"FLASH_ATTN {version}"] = flash_kernel(version)
    else:
        missing.append(Row(SECTION, "FLASH_ATTN", "left out", note="needs vLLM"))
    if importlib.util.find_spec("flashinfer") is not None:
        found["FLASHINFER"] = flashinfer_kernel
    else:
        missing.append(Row(SECTION, "FLASHINFER", "left out", note="not installed"))
    return found, missing


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
