"""Where vLLM meets vToken: the ``vllm.general_plugins`` entry point and the engine arguments.

Nothing happens by installing the package. :func:`register` only teaches EngineCore the control
call and the pulse; scheduler and worker are ours only if :func:`engine_args` went into the engine.
"""

from __future__ import annotations

from typing import Any

from vtoken.config import VTokenConfig
from vtoken.integration.vllm.compat import check_vllm_version

DEFAULT_BLOCK_SIZE = 16
CPU_WORKER = "vtoken.integration.vllm.worker.VTokenCPUWorker"
GPU_WORKER = "vtoken.integration.vllm.gpu_worker.VTokenGPUWorker"


def register() -> None:
    """Called by vLLM in every process (API, engine core, worker), possibly more than once.

    Raises:
        UnsupportedError: the installed vLLM is not a version that this package was built for.
    """
    check_vllm_version()
    from vllm.v1.engine.core import EngineCore

    from vtoken.integration.vllm.engine_core import vtoken_call
    from vtoken.integration.vllm.pulse import vtoken_pulse

    EngineCore.vtoken_call = vtoken_call
    EngineCore.vtoken_pulse = vtoken_pulse


def engine_args(config: VTokenConfig) -> dict[str, Any]:
    """Arguments for ``LLM(...)``, ``AsyncEngineArgs(...)`` or the ``vllm serve`` namespace.

    Args:
        config: with mode ``off`` the result is empty: stock vLLM, by construction.

    Raises:
        UnsupportedError: the installed vLLM is not a version that this package was built for.
    """
    if config.mode == "off":
        return {}
    check_vllm_version()
    from vllm.platforms import current_platform

    return {
        "scheduler_cls": "vtoken.integration.vllm.scheduler.scheduler_for",
        "worker_cls": GPU_WORKER if current_platform.is_cuda() else CPU_WORKER,
        "block_size": DEFAULT_BLOCK_SIZE,
        "additional_config": {"vtoken": config.to_dict()},
    }
