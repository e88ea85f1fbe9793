"""Private names of Model Runner V2, as the same hooks that :mod:`worker_side` offers for V1.

V2 keeps its batch on the device and prepares a step there, so its write slots are a tensor that
nobody may wait for. Requests that resume after a preemption arrive as new ones. Dummy runs pass
through ``execute_model`` too and touch no request. Read against vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.compat.layers import layer_names

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
else:
    # Mixed in before vLLM's class: importing that needs Triton, which V1 does without.
    _Runner = object


class RunnerV2Hooks(_Runner):
    """Mixed into a V2 runner of vLLM: hooks where a step touches the KV cache.

    Hooks run in this order; a step without tokens has neither ``inputs_prepared`` nor a
    forward: ``step_begins``, ``states_updated``, ``inputs_prepared``, (forward).
    """

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """Before anything else; ``touches_blocks``: blocks are zeroed or copied next."""
        raise NotImplementedError

    def states_updated(self, scheduler_output: Any) -> None:
        """Requests are those of this step."""
        raise NotImplementedError

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> None:
        """Batch order and write slots (canonical, on the device) are known."""
        raise NotImplementedError

    def attention_groups(self) -> list[Any]:
        """Attention groups of all caches."""
        return [group for of_cache in self.attn_groups for group in of_cache]

    def metadata_builders(self) -> list[Any]:
        """Attention metadata builders of all groups."""
        return [builder for group in self.attention_groups() for builder in group.metadata_builders]

    def attention_layers(self, names: Iterable[str]) -> dict[str, Any]:
        """vLLM's attention layers by name, in the order of ``names``."""
        layers = self.compilation_config.static_forward_context
        return {name: layers[name] for name in names}

    def layer_caches(self, kv_cache_config: Any) -> dict[str, torch.Tensor]:
        """The cache of each layer of the one KV cache group, in the order of the model."""
        layers = self.attention_layers(layer_names(kv_cache_config))
        return {name: layer.kv_cache for name, layer in layers.items()}

    def finish_requests(self, scheduler_output: Any) -> None:
        """vLLM's first look at a step."""
        touches_blocks = bool(
            scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies
        )
        self.step_begins(scheduler_output, touches_blocks=touches_blocks)
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


@contextmanager
def cpu_runner_class_v2(runner_class: type) -> Iterator[None]:
    """As :func:`worker_side.cpu_runner_class`, for V2: the worker imports it by this name."""
    from vllm.v1.worker.cpu import model_runner

    before = model_runner.CPUModelRunner
    model_runner.CPUModelRunner = runner_class
    try:
        yield
    finally:
        model_runner.CPUModelRunner = before
