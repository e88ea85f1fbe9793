"""Our runners of generation V2: the same core behind the hooks of vLLM's newer model runner.

V2 needs Triton. vLLM takes it on GPUs (:mod:`gpu_runner`); on a CPU only where Triton has a
backend for it, as in our tests, where an interpreter runs its kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.runner_v2 import RunnerV2Hooks
from vtoken.integration.vllm.cpu_core import CpuTokenLayer, live_views
from vtoken.integration.vllm.device_rows import DeviceSlotRows, upload
from vtoken.integration.vllm.runner_base import TokenLayerRunner
from vtoken.integration.vllm.support import check_groups
from vtoken.integration.vllm.worker_core import WorkerCore


class TokenLayerRunnerV2(TokenLayerRunner, RunnerV2Hooks):
    """Mixed into a V2 runner of any device: when the core comes to be, and when it is called."""

    def build_core(self, kv_cache_config: Any) -> WorkerCore:
        """The worker core over the cache, which exists now."""
        raise NotImplementedError

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        """Allocate the cache, then build rows, pool and copy engine over it.

        The small cache over which vLLM measures what CUDA graphs take stays without: it is thrown
        away, and nothing of ours may hold it.

        Raises:
            UnsupportedError: not one group of full attention, or a layer is not ours.
            ConfigError: a layer of ``score_layers`` does not exist.
        """
        check_groups(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if not is_profiling:
            self._core = self.build_core(kv_cache_config)

    def execute_model(
        self, scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        """One step's forward, then the copies of its message overlap whatever follows."""
        output = super().execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run:
            return output
        self.core.after_forward()
        # None: sampling follows and reports. Otherwise this is the step's output.
        return output if output is None else self.with_report(output)

    def append_rows(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> tuple[LiveRows, NDArray[np.int64]]:
        """Append the step's tokens; the batch's rows, and their lengths on the host."""
        rows, lens = self.core.append(req_ids, num_new, write_slots)
        batch = upload(torch.from_numpy(np.stack([rows, lens])), self.device)
        return LiveRows(self.core.rows.table, batch[0], batch[1]), lens

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the output carries the step's report."""
        return self.with_report(super().sample_tokens(grammar_output))


class VTokenCPUModelRunnerV2(CpuTokenLayer, TokenLayerRunnerV2, CPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V2 CPU runner."""

    def build_core(self, kv_cache_config: Any) -> WorkerCore:
        """See :meth:`TokenLayerRunnerV2.build_core`."""
        layers = live_views(self.layer_caches(kv_cache_config))
        geometry = next(iter(layers.values())).geometry
        rows = DeviceSlotRows(self.max_num_reqs, self.max_model_len, geometry, self.device)
        return self.make_core(rows, layers, self.metadata_builders())

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> None:
        """Append the step's tokens and hand the batch's rows to the attention."""
        live, _ = self.append_rows(req_ids, num_new, write_slots)
        for builder in self.metadata_builders():
            builder.set_live_rows(live, self.core.layer_observer)
