"""What our model runners of both generations do alike: hand the scheduler's messages to the core.

A runner of vLLM with hooks around the places where a step touches the KV cache is mixed in by
the classes in :mod:`model_runner` (V1) and :mod:`model_runner_v2`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_cpu import LiveCPUAttentionBackend, LiveCPUMetadataBuilder
from vtoken.integration.vllm.compat.layers import attention_override
from vtoken.integration.vllm.messages import ATTRIBUTE, EMPTY_ROW, StepMessage
from vtoken.integration.vllm.observer import Observer
from vtoken.integration.vllm.ranks import TensorParallelRanks
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.support import check_score_layers, vtoken_config
from vtoken.integration.vllm.worker_core import WorkerCore
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV

_BACKEND_PATH = f"{LiveCPUAttentionBackend.__module__}.{LiveCPUAttentionBackend.__qualname__}"


class TokenLayerRunner:
    """Mixed into a hooked runner, before it."""

    _core: WorkerCore | None = None
    vllm_config: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with our attention in its layers."""
        with attention_override("CPU_ATTN", _BACKEND_PATH):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

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
        pool = KVPool(list(layers.values()))
        group = get_tp_group()
        ranks = TensorParallelRanks(group) if group.world_size > 1 else None
        observer = Observer(rows, layers, ranks)
        return WorkerCore(rows, CpuCopyEngine(pool), pool, observer, ranks)

    def shutdown(self) -> None:
        """Finish outstanding copies, then vLLM's own shutdown."""
        if self._core is not None:
            self._core.close()
        super().shutdown()  # type: ignore[misc]

    @property
    def core(self) -> WorkerCore:
        """The worker core; exists once the KV cache does."""
        assert self._core is not None, "the KV cache is not initialised"
        return self._core

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """Join copies now if blocks are rewritten first, or if no forward will join them."""
        message = getattr(scheduler_output, ATTRIBUTE, None) or _unsent_message(scheduler_output)
        no_forward = scheduler_output.total_num_scheduled_tokens == 0
        self.core.begin_step(message, join_now=touches_blocks or no_forward)

    def states_updated(self, scheduler_output: Any) -> None:
        """Follow the scheduler: rows go with finish and preemption, not with a skipped step."""
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.core.update_rows(ended, new | resumed)

    def with_report(self, output: Any) -> Any:
        """``output`` with the step's report, on its way to the scheduler."""
        # V2 hands out a wrapper whose tensors may still be on their way to the host.
        result = getattr(output, "model_runner_output", output)
        if not isinstance(result, ModelRunnerOutput):
            return output  # intermediate tensors of a pipeline stage
        if result is EMPTY_MODEL_RUNNER_OUTPUT:
            output = result = copy.copy(result)  # one object shared by the whole process
        setattr(result, ATTRIBUTE, self.core.report())
        return output


def _unsent_message(scheduler_output: Any) -> StepMessage:
    """For steps that no scheduler made: vLLM warms up with requests that start from nothing."""
    started = [request.req_id for request in scheduler_output.scheduled_new_reqs]
    return StepMessage(rows=dict.fromkeys(started, EMPTY_ROW))


def live_views(caches: Mapping[str, torch.Tensor]) -> dict[str, SplitKV]:
    """Slot-addressed views of the layers' caches."""
    return {name: SplitKV.from_cache(cache) for name, cache in caches.items()}
