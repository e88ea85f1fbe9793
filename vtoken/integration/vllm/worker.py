"""``worker_cls`` of CPU engines with vToken: vLLM's CPU worker with our model runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.integration.vllm.compat.runner_v2 import cpu_runner_class_v2
from vtoken.integration.vllm.compat.worker_side import cpu_runner_class
from vtoken.integration.vllm.model_runner import VTokenCPUModelRunner
from vtoken.integration.vllm.support import check_supported, vtoken_config


class VTokenCPUWorker(CPUWorker):
    """Checks version and settings before any memory is taken, then builds our runner.

    Raises:
        UnsupportedError: vLLM version or engine settings that vToken cannot serve.
        ConfigError: ``additional_config["vtoken"]`` is invalid.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config)
        self.vtoken_config = vtoken_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Set the process up and build the runner, of the generation that vLLM chose."""
        with self._our_runner():
            super().init_device()

    def _our_runner(self) -> AbstractContextManager[None]:
        if not self.use_v2_model_runner:
            return cpu_runner_class(VTokenCPUModelRunner)
        from vtoken.integration.vllm.model_runner_v2 import VTokenCPUModelRunnerV2

        return cpu_runner_class_v2(VTokenCPUModelRunnerV2)
