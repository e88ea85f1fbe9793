"""The worker core over a CPU's cache, as both generations of our CPU runners make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_cpu import LiveCPUAttentionBackend, LiveCPUMetadataBuilder
from vtoken.integration.vllm.observer import Observer
from vtoken.integration.vllm.runner_base import TokenLayerRunner, other_ranks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.support import check_score_layers, vtoken_config
from vtoken.integration.vllm.worker_core import WorkerCore
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV

BACKEND = (
    "CPU_ATTN",
    f"{LiveCPUAttentionBackend.__module__}.{LiveCPUAttentionBackend.__qualname__}",
)


class CpuTokenLayer(TokenLayerRunner):
    """Mixed into a CPU runner, before its hooks."""

    def live_attention(self) -> tuple[str, str]:
        """See :meth:`TokenLayerRunner.live_attention`."""
        return BACKEND

    def make_core(
        self, rows: SlotRows, layers: Mapping[str, SplitKV], builders: list[Any]
    ) -> WorkerCore:
        """The worker core over a cache that exists now.

        Args:
            rows: empty.
            layers: views of the cache by layer name, in the order of the model.
            builders: that make the attention's metadata.

        Raises:
            UnsupportedError: a builder is not ours.
            ConfigError: a layer of ``score_layers`` does not exist.
        """
        for builder in builders:
            if not isinstance(builder, LiveCPUMetadataBuilder):
                raise UnsupportedError(
                    f"vToken cannot read live tokens through {type(builder).__name__}"
                )
        check_score_layers(vtoken_config(self.vllm_config), len(layers))
        pool, ranks = KVPool(list(layers.values())), other_ranks()
        observer = Observer(rows, layers, ranks)
        return WorkerCore(rows, CpuCopyEngine(pool), pool, observer, ranks)


def live_views(caches: Mapping[str, torch.Tensor]) -> dict[str, SplitKV]:
    """Slot-addressed views of the layers' caches."""
    return {name: SplitKV.from_cache(cache) for name, cache in caches.items()}
