"""Our V1 model runner: hands the scheduler's messages to the worker core at the right moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.layers import layer_names
from vtoken.integration.vllm.compat.worker_side import HookedCPUModelRunner
from vtoken.integration.vllm.cpu_core import CpuTokenLayer, live_views
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.integration.vllm.support import check_groups


class VTokenCPUModelRunner(CpuTokenLayer, HookedCPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V1 CPU runner."""

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, then build rows, pool and copy engine over it.

        Raises:
            UnsupportedError: not one group of full attention, or a layer is not ours.
            ConfigError: a layer of ``score_layers`` does not exist.
        """
        check_groups(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        names = layer_names(kv_cache_config)
        layers = live_views(dict(zip(names, self.kv_caches, strict=True)))
        geometry = layers[names[0]].geometry
        rows = SlotRows(self.max_num_reqs, self.max_model_len, geometry)
        self._core = self.make_core(rows, layers, self.metadata_builders())

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """One step's forward, then the copies of its message overlap whatever follows."""
        output = super().execute_model(scheduler_output, intermediate_tensors)
        self.core.after_forward()
        # None: sampling follows and reports. Otherwise this is the step's output.
        return output if output is None else self.with_report(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the output carries the step's report."""
        return self.with_report(super().sample_tokens(grammar_output))

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: NDArray[np.int64]
    ) -> None:
        """Append the step's tokens and hand the batch's rows to the attention."""
        rows, lens = self.core.append(req_ids, num_new, write_slots)
        live = LiveRows(self.core.rows.table, torch.from_numpy(rows), torch.from_numpy(lens))
        for builder in self.metadata_builders():
            builder.set_live_rows(live, self.core.layer_observer)
