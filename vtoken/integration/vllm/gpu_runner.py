"""Our V2 model runner on GPUs, where vLLM takes V2 by default.

Imported only then: V2 needs Triton.
"""

from __future__ import annotations

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vtoken.integration.vllm.compat.runner_v2 import RunnerV2Hooks
from vtoken.integration.vllm.gpu_layer import GpuTokenLayer


class VTokenGPUModelRunner(GpuTokenLayer, RunnerV2Hooks, GPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V2 GPU runner."""
