"""What our CPU runners of both generations share: the worker core over a CPU's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

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
    """Mixed into a CPU runner, before the hooks of its generation.

    Attributes:
        rows_class: V1's write slots have arrived when we see them; nobody waits for V2's.
    """

    rows_class: ClassVar[type[SlotRows]]
    max_num_reqs: int
    max_model_len: int

    def live_attention(self) -> tuple[str, str]:
        """See :meth:`TokenLayerRunner.live_attention`."""
        return BACKEND

    def build_core(self, kv_cache_config: Any) -> WorkerCore:
        """See :meth:`TokenLayerRunner.build_core`."""
        for builder in self.metadata_builders():
            if not isinstance(builder, LiveCPUMetadataBuilder):
                raise UnsupportedError(
                    f"vToken cannot read live tokens through {type(builder).__name__}"
                )
        layers = live_views(self.layer_caches(kv_cache_config))
        check_score_layers(vtoken_config(self.vllm_config), len(layers))
        geometry = next(iter(layers.values())).geometry
        rows = self.rows_class(self.max_num_reqs, self.max_model_len, geometry, self.device)
        pool, ranks = KVPool(list(layers.values())), other_ranks()
        observer = Observer(rows, layers, ranks)
        return WorkerCore(rows, CpuCopyEngine(pool), pool, observer, ranks)

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> None:
        """Append the step's tokens and hand the batch's rows to the attention."""
        live, _ = self.append_rows(req_ids, num_new, write_slots)
        for builder in self.metadata_builders():
            builder.set_live_rows(live, self.core.layer_observer)


def live_views(caches: Mapping[str, torch.Tensor]) -> dict[str, SplitKV]:
    """Slot-addressed views of the layers' caches."""
    return {name: SplitKV.from_cache(cache) for name, cache in caches.items()}
