"""Private names of Model Runner V2, behind the hooks of :mod:`runner_hooks`.

V2 keeps its batch on the device and prepares a step there, so its write slots are a tensor that
nobody may wait for. Requests that resume after a preemption arrive as new ones. Dummy runs pass
through ``execute_model`` too and touch no request. Read against vLLM 0.32.0.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from vtoken.integration.vllm.compat.replaced import replaced
from vtoken.integration.vllm.compat.runner_hooks import RunnerHooks, touches_blocks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
else:
    # Mixed in before vLLM's class: importing that needs Triton, which V1 does without.
    _Runner = object


class RunnerV2Hooks(RunnerHooks, _Runner):
    """Mixed into a V2 runner of vLLM, before it."""

    def finish_requests(self, scheduler_output: Any) -> None:
        """vLLM's first look at a step."""
        self.step_begins(scheduler_output, touches_blocks=touches_blocks(scheduler_output))
        super().finish_requests(scheduler_output)

    def update_requests(self, scheduler_output: Any) -> None:
        """vLLM's last change of its requests; zeroes and copies blocks."""
        super().update_requests(scheduler_output)
        self.states_updated(scheduler_output)

    def prepare_attn(self, input_batch: Any) -> Any:
        """vLLM's block tables and write slots of the batch."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        write_slots = slot_mappings[0][: input_batch.num_tokens]
        num_new = input_batch.num_scheduled_tokens
        self.inputs_prepared(input_batch.req_ids, num_new, write_slots)
        return block_tables, slot_mappings

    def last_forward(self) -> tuple[torch.Tensor, list[str]]:
        """See :meth:`RunnerHooks.last_forward`."""
        state = self.execute_model_state
        return state.hidden_states, list(state.input_batch.req_ids)


def cpu_runner_class_v2(runner_class: type) -> AbstractContextManager[None]:
    """As :func:`worker_side.cpu_runner_class`, for V2: the worker imports it by this name."""
    from vllm.v1.worker.cpu import model_runner

    return replaced(model_runner, "CPUModelRunner", runner_class)
