"""The worker core over a GPU's cache: one-token pages, the CUDA copy engine, live tables.

The parts of :mod:`gpu_layer`, which makes its core here once the cache exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.copy_engine.cuda import CudaCopyEngine, CudaStreams, Streams, choose_mover
from vtoken.gpu_scores.mass import Scorer, choose_scorer
from vtoken.integration.vllm.attention_gpu import attach_tables
from vtoken.integration.vllm.compat.gpu_side import fp8_logit_scale
from vtoken.integration.vllm.observer_gpu import LogitScale, PagedObserver
from vtoken.integration.vllm.query_capture import QueryCapture
from vtoken.integration.vllm.ranks import Ranks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.worker_core import WorkerCore
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import Mover, PagedPool


@dataclass(frozen=True)
class TokenPages:
    """Slots as kernels number them where a page is a token: as the scheduler does.

    Attributes:
        block_size: tokens per block of the scheduler.
    """

    block_size: int

    def kernel_slots(self, slots: Any) -> Any:
        """Equal to ``slots``; a new array or tensor."""
        return slots + 0

    def canonical_slots(self, kernel_slots: Any) -> Any:
        """Equal to ``kernel_slots``; a new array or tensor."""
        return kernel_slots + 0


@dataclass(frozen=True)
class GpuTools:
    """What depends on the machine.

    Attributes:
        streams: of the device.
        mover: copies tokens.
        scorer: computes masses.
        is_capturing: whether a graph is being captured right now.
    """

    streams: Streams
    mover: Mover
    scorer: Scorer
    is_capturing: Callable[[], bool]


def cuda_tools(device: torch.device) -> GpuTools:
    """Of a CUDA device."""
    return GpuTools(
        CudaStreams(device),
        choose_mover(device),
        choose_scorer(device),
        torch.cuda.is_current_stream_capturing,
    )


@dataclass(frozen=True, eq=False)
class GpuCore:
    """What :func:`make_gpu_core` made.

    Attributes:
        worker: the worker core.
        pool: all layers, with the mover.
        layers: the cache by layer name, in the order of the model.
        scales: how the sampled layers scale their logits.
        tools: see :class:`GpuTools`.
    """

    worker: WorkerCore
    pool: PagedPool
    layers: Mapping[str, PagedKV]
    scales: Mapping[str, LogitScale]
    tools: GpuTools


def make_gpu_core(
    rows: SlotRows,
    caches: Mapping[str, torch.Tensor],
    layers: Mapping[str, Any],
    groups: Iterable[Any],
    capture: QueryCapture,
    tools: GpuTools,
    ranks: Ranks | None = None,
) -> GpuCore:
    """The worker core over a cache that exists now; attaches builders and sampled layers.

    Args:
        rows: empty, of :class:`TokenPages`, on the device.
        caches: ``[B, H, N, C]`` of each layer, in the order of the model.
        layers: vLLM's attention layers by name.
        groups: vLLM's attention groups.
        capture: buffers of the sampled layers.
        tools: see :class:`GpuTools`.
        ranks: under tensor parallelism.

    Raises:
        UnsupportedError: a builder is not ours, or a cache has no whole words.
    """
    attach_tables(groups)
    paged = {
        name: PagedKV.from_cache(as_numbers(cache, layers[name].impl.kv_cache_dtype))
        for name, cache in caches.items()
    }
    pool = PagedPool(list(paged.values()), tools.mover)
    capture.attach(layers)
    scales = {name: logit_scale(layers[name]) for name in capture.queries}
    observer = PagedObserver(rows, paged, capture, scales, tools.scorer, ranks)
    engine = CudaCopyEngine(pool, tools.streams)
    worker = WorkerCore(rows, engine, pool, observer, ranks)
    return GpuCore(worker, pool, paged, scales, tools)


def as_numbers(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """``cache`` with the dtype of what it holds: vLLM stores fp8 in bytes."""
    if cache.dtype == torch.uint8 and kv_cache_dtype.startswith("fp8"):
        return cache.view(torch.float8_e4m3fn)
    return cache


def logit_scale(layer: Any) -> LogitScale:
    """How an attention layer of vLLM scales its logits, the scales of an fp8 cache included."""
    impl = layer.impl
    scale = float(impl.scale)
    if impl.kv_cache_dtype.startswith("fp8"):
        scale *= fp8_logit_scale(layer)
    return LogitScale(scale, float(impl.logits_soft_cap or 0.0))
