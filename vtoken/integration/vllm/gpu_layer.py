"""What our GPU runners of both generations share: one-token pages, copies on a stream of their own.

**Never run on a GPU**: its parts and the runners themselves run in the tests, under Triton's
interpreter, with recorded streams. So before it serves it proves itself on the device that it
finds: :mod:`self_check` and :mod:`self_check_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vtoken.device_check import Finding
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_gpu_choice import (
    BackendChoice,
    GpuFacts,
    LayerFacts,
    choose_gpu_backend,
)
from vtoken.integration.vllm.compat.gpu_side import flash_attn_version, has_flashinfer
from vtoken.integration.vllm.device_rows import DeviceSlotRows
from vtoken.integration.vllm.gpu_core import (
    GpuCore,
    GpuTools,
    TokenPages,
    cuda_tools,
    make_gpu_core,
)
from vtoken.integration.vllm.observer import default_layers
from vtoken.integration.vllm.observer_gpu import observation_bytes
from vtoken.integration.vllm.query_capture import QueryCapture
from vtoken.integration.vllm.runner_base import TokenLayerRunner, other_ranks
from vtoken.integration.vllm.self_check import PartsCheck
from vtoken.integration.vllm.self_check_steps import StepsCheck
from vtoken.integration.vllm.support import check_score_layers, vtoken_config
from vtoken.integration.vllm.worker_core import WorkerCore
from vtoken.policies.registry import all_policies


class GpuTokenLayer(TokenLayerRunner):
    """Mixed into a GPU runner, before the hooks of its generation.

    Attributes:
        gpu: see :func:`make_gpu_core`; exists once the KV cache does.
    """

    gpu: GpuCore | None = None
    model_config: Any
    cache_config: Any
    dtype: torch.dtype
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    get_kv_cache_spec: Any

    def tools(self) -> GpuTools:
        """What copies and scores run on; tests put recorded streams here."""
        return cuda_tools(self.device)

    def facts(self) -> GpuFacts:
        """What the machine is."""
        capability = current_platform.get_device_capability()
        assert capability is not None, "a CUDA device has a compute capability"
        version = flash_attn_version(self.model_config.get_head_size())
        return GpuFacts((capability.major, capability.minor), version, has_flashinfer())

    def choose_backend(self) -> BackendChoice:
        """The kernel that reads live tokens here.

        Raises:
            UnsupportedError: there is none; every reason is listed.
        """
        asked = self.vllm_config.attention_config.backend
        layer = LayerFacts(
            head_size=self.model_config.get_head_size(),
            kv_cache_dtype=self.cache_config.cache_dtype,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        return choose_gpu_backend(self.facts(), layer, None if asked is None else asked.name)

    def live_attention(self) -> tuple[str, str]:
        """The chosen backend; vLLM is told to take no other."""
        choice = self.choose_backend()
        attention = self.vllm_config.attention_config
        attention.backend = AttentionBackendEnum[choice.name]
        if choice.name == "FLASHINFER":
            # Its XQA and TensorRT-LLM kernels read larger pages only.
            if attention.use_trtllm_attention:
                raise UnsupportedError(
                    "attention_config.use_trtllm_attention=true: TensorRT-LLM's kernels cannot "
                    "read pages of one token"
                )
            attention.use_trtllm_attention = False
        return choice.name, choice.class_path

    def buffer_bytes(self) -> int:
        """Device memory that the token layer takes beside the cache, known before there is one.

        Two tables, of which vLLM's own replaces one with an entry per block; the queries of the
        sampled layers; and what observing takes under any policy, since each request may name its
        own when the cache has long taken the rest.
        """
        layers = self.attention_layers(self.get_kv_cache_spec())
        impl = next(iter(layers.values())).impl
        query = self.max_num_tokens * impl.num_heads * impl.head_size * self.dtype.itemsize
        width = self.max_model_len + 2 * self.cache_config.block_size
        tables = 2 * self.max_num_reqs * width * torch.int32.itemsize
        signals = frozenset[str]().union(*(policy.signals for policy in all_policies().values()))
        observing = observation_bytes(signals, self.max_num_reqs, width, impl.num_heads)
        return int(tables + len(self._sampled(list(layers))) * query + observing)

    def build_core(self, kv_cache_config: Any) -> WorkerCore:
        """See :meth:`TokenLayerRunner.build_core`."""
        caches = self.layer_caches(kv_cache_config)
        names, layers = list(caches), self.attention_layers(caches)
        tools, impl = self.tools(), layers[names[0]].impl
        rows = DeviceSlotRows(
            self.max_num_reqs,
            self.max_model_len,
            TokenPages(self.cache_config.block_size),
            self.device,
        )
        capture = QueryCapture(
            self._sampled(names),
            (self.max_num_tokens, impl.num_heads, impl.head_size),
            self.dtype,
            self.device,
            tools.is_capturing,
        )
        groups = self.attention_groups()
        self.gpu = make_gpu_core(rows, caches, layers, groups, capture, tools, other_ranks())
        return self.gpu.worker

    def shutdown(self) -> None:
        """See :meth:`TokenLayerRunner.shutdown`."""
        self.gpu = None
        super().shutdown()

    def _sampled(self, names: list[str]) -> list[str]:
        """Layers whose queries are observed: fixed from here on."""
        config = vtoken_config(self.vllm_config)
        check_score_layers(config, len(names))
        numbers = config.score_layers
        return [names[i] for i in (default_layers(len(names)) if numbers is None else numbers)]

    def inputs_prepared(
        self, req_ids: list[str], num_new: NDArray[np.int32], write_slots: torch.Tensor
    ) -> None:
        """Append the step's tokens and fill the tables that the attention reads."""
        live, lens = self.append_rows(req_ids, num_new, write_slots)
        for builder in self.metadata_builders():
            builder.set_live_rows(live, lens_cpu=torch.from_numpy(lens))

    def check_parts(self) -> Iterator[Finding]:
        """Copies, reads and scores on the new cache; see :mod:`self_check`. It is zero again."""
        assert self.gpu is not None, "the KV cache is not initialised"
        yield from PartsCheck(self, self.gpu).findings()

    def check_steps(self) -> Iterator[Finding]:
        """Whole steps, graphs included, once they are captured; see :mod:`self_check_steps`."""
        assert self.gpu is not None, "the KV cache is not initialised"
        yield from StepsCheck(self, self.gpu.pool).findings()
