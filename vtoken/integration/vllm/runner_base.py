"""What all our model runners do: hand the scheduler's messages to the core at the right moments.

    runner_base           every runner
    ├── cpu_core          on CPUs      ─▶ model_runner (V1), model_runner_v2
    └── gpu_layer         on GPUs      ─▶ gpu_runner_v1, gpu_runner (V2)

The classes at the right mix in the hooks of their generation (:mod:`compat.runner_hooks`) and
vLLM's own runner of their device; they hold nothing else.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.layers import attention_override
from vtoken.integration.vllm.compat.runner_hooks import RunnerHooks, model_output
from vtoken.integration.vllm.device_rows import upload
from vtoken.integration.vllm.messages import ATTRIBUTE, EMPTY_ROW, StepMessage
from vtoken.integration.vllm.ranks import TensorParallelRanks
from vtoken.integration.vllm.support import check_groups
from vtoken.integration.vllm.worker_core import WorkerCore


class TokenLayerRunner(RunnerHooks):
    """Mixed into a hooked runner, before it."""

    _core: WorkerCore | None = None
    vllm_config: Any
    device: torch.device

    def live_attention(self) -> tuple[str, str]:
        """vLLM's name of a backend, and the path of our class that stands in for it."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with our attention in its layers."""
        with attention_override(*self.live_attention()):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def build_core(self, kv_cache_config: Any) -> WorkerCore:
        """The worker core over the cache, which exists now.

        Raises:
            UnsupportedError: a layer is not ours.
            ConfigError: a layer of ``score_layers`` does not exist.
        """
        raise NotImplementedError

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        """Allocate the cache, then build rows, pool and copy engine over it.

        The small cache over which vLLM measures what CUDA graphs take stays without: it is thrown
        away, and nothing of ours may hold it.

        Raises:
            UnsupportedError: not one group of full attention, or as :meth:`build_core`.
            ConfigError: as :meth:`build_core`.
        """
        check_groups(kv_cache_config)
        super().initialize_kv_cache(  # type: ignore[misc]
            kv_cache_config, is_profiling=is_profiling, **kwargs
        )
        if not is_profiling:
            self._core = self.build_core(kv_cache_config)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """One step's forward, then the copies of its message overlap whatever follows.

        V2's dummy runs (``dummy_run=True``) are none of ours.
        """
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("dummy_run"):
            return output
        self.core.after_forward()
        # None: sampling follows and reports. Otherwise this is the step's output.
        return output if output is None else self.with_report(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the output carries the step's report."""
        return self.with_report(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def shutdown(self) -> None:
        """Finish outstanding copies and let go of the cache, then vLLM's own shutdown."""
        if self._core is not None:
            self._core.close()
            self._core = None
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

    def append_rows(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> tuple[LiveRows, NDArray[np.int64]]:
        """Append the step's tokens; the batch's rows, and their lengths on the host."""
        rows, lens = self.core.append(req_ids, num_new, write_slots)
        batch = upload(torch.from_numpy(np.stack([rows, lens])), self.device)
        return LiveRows(self.core.rows.table, batch[0], batch[1]), lens

    def with_report(self, output: Any) -> Any:
        """``output`` with the step's report, on its way to the scheduler."""
        result = model_output(output)
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


def other_ranks() -> TensorParallelRanks | None:
    """The workers that hold the other heads; None if this one has all of them."""
    group = get_tp_group()
    return TensorParallelRanks(group) if group.world_size > 1 else None
