"""Our V1 model runner on CPUs, which vLLM's CPU engine takes."""

from __future__ import annotations

from vtoken.integration.vllm.compat.worker_side import HookedCPUModelRunner
from vtoken.integration.vllm.cpu_core import CpuTokenLayer
from vtoken.integration.vllm.slot_rows import SlotRows


class VTokenCPUModelRunner(CpuTokenLayer, HookedCPUModelRunner):
    """Reads live tokens only and relocates them between steps; else vLLM's V1 CPU runner."""

    rows_class = SlotRows
