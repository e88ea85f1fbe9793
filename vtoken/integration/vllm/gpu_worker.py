"""``worker_cls`` of engines on GPUs with vToken: vLLM's GPU worker with our model runner.

Where vLLM's worker has something done, ours has it checked afterwards:

    load model ▶ profile memory ▶ allocate cache ▶ warm up, capture graphs ▶ serve
                 minus our own     check parts      check whole steps
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from vtoken.device_check import Finding, refuse_failed
from vtoken.integration.vllm.compat.gpu_side import HookedGPUWorker
from vtoken.integration.vllm.support import check_supported, vtoken_config

logger = logging.getLogger(__name__)


class GpuTokenLayerWorker:
    """Mixed into a worker of vLLM whose runner is a :class:`gpu_layer.GpuTokenLayer`.

    Attributes:
        findings: of the checks at start.

    Raises:
        UnsupportedError: vLLM version or engine settings that vToken cannot serve, or a device
            that fails a check.
        ConfigError: ``additional_config["vtoken"]`` is invalid.
    """

    model_runner: Any
    cache_config: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config)
        self.vtoken_config = vtoken_config(vllm_config)
        self.findings: list[Finding] = []
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def determine_available_memory(self) -> int:
        """What vLLM leaves for the cache, minus what the token layer takes beside it.

        A size that the user gave stays as it is.
        """
        available: int = super().determine_available_memory()  # type: ignore[misc]
        kept = int(self.model_runner.buffer_bytes())
        is_given = bool(self.cache_config.kv_cache_memory_bytes)
        logger.info(
            "vToken takes up to %.2f GiB beside the KV cache, %s; max_num_seqs and max_model_len "
            "decide how much",
            kept / 2**30,
            "which kv_cache_memory_bytes must leave free" if is_given else "which are kept back",
        )
        return available if is_given else available - kept

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the cache, then check copies, reads and scores on it."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._prove("parts", self.model_runner.check_parts)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture graphs, then check whole steps."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self._prove("steps", self.model_runner.check_steps)
        logger.warning(
            "vToken on CUDA is new and was developed without a GPU. This one passed %d checks; "
            "read docs/gpu.md before you trust it",
            len(self.findings),
        )
        return times

    def _prove(self, what: str, check: Callable[[], Iterator[Finding]]) -> None:
        """Run a check, log what it finds, refuse to start if a proof failed."""
        start = time.monotonic()
        findings = list(check())
        seconds = time.monotonic() - start
        for finding in findings:
            level = logging.INFO if finding.ok else logging.ERROR
            logger.log(level, "vToken checked this device: %s", finding)
        logger.info("vToken checked %s of this device in %.1f s", what, seconds)
        self.findings += findings
        refuse_failed(findings)


class VTokenGPUWorker(GpuTokenLayerWorker, HookedGPUWorker):
    """vLLM's GPU worker, with our runner."""

    def make_runner(self) -> Any:
        """See :class:`HookedGPUWorker`: of the generation that vLLM chose."""
        return gpu_runner_class(self.use_v2_model_runner)(self.vllm_config, self.device)


def gpu_runner_class(is_v2: bool) -> Any:
    """Our GPU runner of a generation; importing V2's needs Triton."""
    if is_v2:
        from vtoken.integration.vllm.gpu_runner import VTokenGPUModelRunner

        return VTokenGPUModelRunner
    from vtoken.integration.vllm.gpu_runner_v1 import VTokenGPUModelRunnerV1

    return VTokenGPUModelRunnerV1
