"""vLLM's private worker names: runner construction, runner hooks.

:class:`HookedCPUModelRunner` overrides what is private in vLLM's V1 runner and offers public
hook methods instead; :mod:`vtoken.integration.vllm.model_runner` implements these and knows
nothing about the names behind them. Read against vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@contextmanager
def cpu_runner_class(runner_class: type[CPUModelRunner]) -> Iterator[None]:
    """Let ``CPUWorker.init_device``, called inside the block, build ``runner_class``.

    The worker names its runner class in its own body and offers no factory; replacing the name
    for the length of the call keeps our class a normal one, with its own constructor.
    """
    before = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = runner_class
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = before


class HookedCPUModelRunner(CPUModelRunner):
    """vLLM's V1 CPU runner with hooks around the places where a step touches the KV cache.

    Hooks run in this order; a step without tokens has neither ``inputs_prepared`` nor a
    forward: ``step_begins``, ``states_updated``, ``inputs_prepared``, (forward).
    """

    def step_begins(self, scheduler_output: Any, *, touches_blocks: bool) -> None:
        """Before anything else; ``touches_blocks``: blocks are zeroed or copied next."""
        raise NotImplementedError

    def states_updated(self, scheduler_output: Any) -> None:
        """The persistent batch is the one of this step."""
        raise NotImplementedError

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: NDArray[np.int64]
    ) -> None:
        """Batch order and write slots (canonical, ``[num_new.sum()]``) are known.

        Both arrays are vLLM's own buffers: valid in this step only.
        """
        raise NotImplementedError

    def metadata_builders(self) -> list[Any]:
        """Attention metadata builders of all groups."""
        return [
            builder for group in self._attn_group_iterator() for builder in group.metadata_builders
        ]

    def _update_states(self, scheduler_output: Any) -> Any:
        touches_blocks = bool(
            scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies
        )
        self.step_begins(scheduler_output, touches_blocks=touches_blocks)
        result = super()._update_states(scheduler_output)
        self.states_updated(scheduler_output)
        return result

    def _prepare_inputs(
        self, scheduler_output: Any, num_scheduled_tokens: NDArray[np.int32]
    ) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        total = scheduler_output.total_num_scheduled_tokens
        write_slots = batch.block_table[0].slot_mapping.np[:total]
        self.inputs_prepared(batch.req_ids[: batch.num_reqs], num_scheduled_tokens, write_slots)
        return result

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Sample, but leave seeded generators of unfinished prefills where they were.

        vLLM samples for every request and rewinds these generators afterwards through their
        offset, which CPU generators do not have ("CPU Generator does not use offset"): a
        seeded request with chunked prefill would kill the engine. See ``_bookkeeping_sync``.
        """
        unfinished = self._unfinished_generators()
        states = [generator.get_state() for generator in unfinished.values()]
        result = super()._sample(logits, spec_decode_metadata)
        for generator, state in zip(unfinished.values(), states, strict=True):
            generator.set_state(state)
        return result

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # Already rewound in _sample: hide them from the rewinding that fails.
        generators: dict[int, torch.Generator] = self.input_batch.generators
        unfinished = self._unfinished_generators()
        for index in unfinished:
            del generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(unfinished)

    def _unfinished_generators(self) -> dict[int, torch.Generator]:
        batch = self.input_batch
        if not batch.generators:
            return {}
        discard = self.discard_request_mask.np[: batch.num_reqs]
        return {i: g for i, g in batch.generators.items() if i < len(discard) and discard[i]}
