"""Private names of Model Runner V1, on CPUs and GPUs, behind the hooks of :mod:`runner_hooks`.

V1 keeps its batch on the host and computes write slots on the device. Requests that resume after a
preemption arrive as cached ones. Dummy runs do not pass here. Read against vLLM 0.32.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.compat.runner_hooks import RunnerHooks, touches_blocks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object  # mixed in before vLLM's class


class RunnerV1Hooks(RunnerHooks, _Runner):
    """Mixed into a V1 runner of vLLM, before it."""

    def _update_states(self, scheduler_output: Any) -> Any:
        self.step_begins(scheduler_output, touches_blocks=touches_blocks(scheduler_output))
        result = super()._update_states(scheduler_output)
        self.states_updated(scheduler_output)
        return result

    def _prepare_inputs(
        self, scheduler_output: Any, num_scheduled_tokens: NDArray[np.int32]
    ) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        total = scheduler_output.total_num_scheduled_tokens
        write_slots = batch.block_table[0].slot_mapping.gpu[:total]
        self.inputs_prepared(batch.req_ids[: batch.num_reqs], num_scheduled_tokens, write_slots)
        return result

    def last_forward(self) -> tuple[torch.Tensor, list[str]]:
        """See :meth:`RunnerHooks.last_forward`."""
        return self.execute_model_state.hidden_states, list(self.input_batch.req_ids)
