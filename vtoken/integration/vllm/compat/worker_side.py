"""Private names of vLLM's CPU worker and of its V1 runner. Read against vLLM 0.32.0."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.integration.vllm.compat.replaced import replaced
from vtoken.integration.vllm.compat.runner_v1 import RunnerV1Hooks


def cpu_runner_class(runner_class: type[CPUModelRunner]) -> AbstractContextManager[None]:
    """Let ``CPUWorker.init_device``, called inside the block, build ``runner_class``.

    The worker names its runner class in its own body and offers no factory; replacing the name
    for the length of the call keeps our class a normal one, with its own constructor.
    """
    return replaced(cpu_worker, "CPUModelRunner", runner_class)


class HookedCPUModelRunner(RunnerV1Hooks, CPUModelRunner):
    """vLLM's V1 CPU runner with our hooks, and with generators that a CPU can rewind."""

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
