"""What our model runners of both generations do alike: hand the scheduler's messages to the core.

A runner of vLLM with hooks around the places where a step touches the KV cache is mixed in by
the classes in :mod:`model_runner` (V1), :mod:`model_runner_v2` and :mod:`gpu_runner`.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed import get_tp_group
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vtoken.integration.vllm.compat.layers import attention_override
from vtoken.integration.vllm.messages import ATTRIBUTE, EMPTY_ROW, StepMessage
from vtoken.integration.vllm.ranks import TensorParallelRanks
from vtoken.integration.vllm.worker_core import WorkerCore


class TokenLayerRunner:
    """Mixed into a hooked runner, before it."""

    _core: WorkerCore | None = None
    vllm_config: Any

    def live_attention(self) -> tuple[str, str]:
        """vLLM's name of a backend, and the path of our class that stands in for it."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with our attention in its layers."""
        with attention_override(*self.live_attention()):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

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


def other_ranks() -> TensorParallelRanks | None:
    """The workers that hold the other heads; None if this one has all of them."""
    group = get_tp_group()
    return TensorParallelRanks(group) if group.world_size > 1 else None
