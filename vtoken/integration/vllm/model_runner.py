"""Our V1 model runner: hands the scheduler's messages to the worker core at the right moments."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_cpu import LiveCPUAttentionBackend, LiveCPUMetadataBuilder
from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.worker_side import (
    HookedCPUModelRunner,
    cpu_attention_override,
    layer_names,
)
from vtoken.integration.vllm.messages import ATTRIBUTE, StepMessage
from vtoken.integration.vllm.observer import Observer
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.support import check_groups, check_score_layers, vtoken_config
from vtoken.integration.vllm.worker_core import WorkerCore
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV

_BACKEND_PATH = f"{LiveCPUAttentionBackend.__module__}.{LiveCPUAttentionBackend.__qualname__}"


class VTokenCPUModelRunner(HookedCPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V1 CPU runner."""

    _core: WorkerCore | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the model with our attention in its layers."""
        with cpu_attention_override(_BACKEND_PATH):
            super().load_model(load_dummy_weights)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, then build rows, pool and copy engine over it.

        Raises:
            UnsupportedError: not one group of full attention, or a layer is not ours.
            ConfigError: a layer of ``score_layers`` does not exist.
        """
        check_groups(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        for builder in self.metadata_builders():
            if not isinstance(builder, LiveCPUMetadataBuilder):
                raise UnsupportedError(
                    f"vToken cannot read live tokens through {type(builder).__name__}"
                )
        layers = [SplitKV.from_cache(cache) for cache in self.kv_caches]
        pool = KVPool(layers)
        rows = SlotRows(self.max_num_reqs, self.max_model_len, layers[0].geometry)
        names = layer_names(kv_cache_config)
        check_score_layers(vtoken_config(self.vllm_config), len(names))
        observer = Observer(rows, dict(zip(names, layers, strict=True)))
        self._core = WorkerCore(rows, CpuCopyEngine(pool), pool, observer)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """One step's forward, then the copies of its message overlap whatever follows."""
        output = super().execute_model(scheduler_output, intermediate_tensors)
        self.core.after_forward()
        # None: sampling follows and reports. Otherwise this is the step's output.
        return output if output is None else self._with_report(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the output carries the step's report."""
        return self._with_report(super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        """Finish outstanding copies, then vLLM's own shutdown."""
        if self._core is not None:
            self._core.close()
        super().shutdown()

    @property
    def core(self) -> WorkerCore:
        """The worker core; exists once the KV cache does."""
        assert self._core is not None, "the KV cache is not initialised"
        return self._core

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """Join copies now if blocks are rewritten first, or if no forward will join them."""
        message = getattr(scheduler_output, ATTRIBUTE, None) or StepMessage()
        no_forward = scheduler_output.total_num_scheduled_tokens == 0
        self.core.begin_step(message, join_now=touches_blocks or no_forward)

    def states_updated(self, scheduler_output: Any) -> None:
        """Follow the scheduler: rows go with finish and preemption, not with a skipped step."""
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.core.update_rows(ended, new | resumed)

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: NDArray[np.int64]
    ) -> None:
        """Append the step's tokens and hand the batch's rows to the attention."""
        rows, lens = self.core.append(req_ids, num_new, write_slots)
        live = LiveRows(self.core.rows.table, torch.from_numpy(rows), torch.from_numpy(lens))
        for builder in self.metadata_builders():
            builder.set_live_rows(live, self.core.layer_observer)

    def _with_report(self, output: Any) -> Any:
        if not isinstance(output, ModelRunnerOutput):
            return output  # intermediate tensors of a pipeline stage
        if output is EMPTY_MODEL_RUNNER_OUTPUT:
            output = copy.copy(output)  # one object shared by the whole process
        setattr(output, ATTRIBUTE, self.core.report())
        return output
