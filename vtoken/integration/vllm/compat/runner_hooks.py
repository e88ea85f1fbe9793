"""What we ask of vLLM's model runners, the same for both generations and on every device.

:mod:`runner_v1` and :mod:`runner_v2` override what is private in their generation and call these
hooks; our runners implement them and know nothing about the names behind them. Read against vLLM
0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.compat.layers import layer_names


class RunnerHooks:
    """Mixed into a runner of vLLM: hooks where a step touches the KV cache, and where things are.

    Hooks run in this order; a step without tokens has neither ``inputs_prepared`` nor a
    forward: ``step_begins``, ``states_updated``, ``inputs_prepared``, (forward).
    """

    attn_groups: Any
    compilation_config: Any

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """Before anything else; ``touches_blocks``: blocks are zeroed or copied next."""
        raise NotImplementedError

    def states_updated(self, scheduler_output: Any) -> None:
        """Requests are those of this step."""
        raise NotImplementedError

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> None:
        """Batch order and write slots (canonical, ``[num_new.sum()]``, on the device) are known.

        Both are vLLM's own buffers: valid in this step only.
        """
        raise NotImplementedError

    def last_forward(self) -> tuple[torch.Tensor, list[str]]:
        """Between a forward and its sampling: hidden states (``[num_tokens, hidden]``, padded), and
        the batch's requests in order."""
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


def touches_blocks(scheduler_output: Any) -> bool:
    """Whether vLLM zeroes or copies blocks before the forward of this step."""
    return bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)


def model_output(output: Any) -> Any:
    """What a runner returned, without the wrapper that waits for tensors on their way to the host.

    Each generation has a wrapper of its own; it hands out the object that it wraps.
    """
    for name in ("model_runner_output", "_model_runner_output"):
        output = getattr(output, name, output)
    return output
