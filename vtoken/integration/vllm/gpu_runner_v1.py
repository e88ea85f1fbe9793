"""Our V1 model runner on GPUs: with ``VLLM_USE_V2_MODEL_RUNNER=0``, or where vLLM finds that V2
does not serve a model.

vLLM calls V1 deprecated there. It works with and without asynchronous scheduling, as V2 does.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.integration.vllm.compat.runner_v1 import RunnerV1Hooks
from vtoken.integration.vllm.gpu_layer import GpuTokenLayer


class VTokenGPUModelRunnerV1(GpuTokenLayer, RunnerV1Hooks, GPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V1 GPU runner."""
