"""Our V2 model runner on CPUs.

V2 needs Triton. vLLM takes it on a CPU only where Triton has a backend for it, as in our tests,
where an interpreter runs its kernels.
"""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vtoken.integration.vllm.compat.runner_v2 import RunnerV2Hooks
from vtoken.integration.vllm.cpu_core import CpuTokenLayer
from vtoken.integration.vllm.device_rows import DeviceSlotRows


class VTokenCPUModelRunnerV2(CpuTokenLayer, RunnerV2Hooks, CPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V2 CPU runner."""

    rows_class = DeviceSlotRows
