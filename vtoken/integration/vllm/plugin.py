"""Where vLLM meets vToken: the ``vllm.general_plugins`` entry point and the engine arguments.

Nothing happens by installing the package. :func:`register` only teaches EngineCore the control
call and the pulse; scheduler and worker are ours only if :func:`engine_args` went into the engine.
"""

from __future__ import annotations

import logging
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.compat import check_vllm_version

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
CPU_WORKER = "vtoken.integration.vllm.worker.VTokenCPUWorker"
GPU_WORKER = "vtoken.integration.vllm.gpu_worker.VTokenGPUWorker"


def register() -> None:
    """Called by vLLM in every process (API, engine core, worker), possibly more than once, and in
    every vLLM of this environment, whoever starts it.

    With a version that this package was not built for nothing is touched: whoever wants vToken of
    it is refused by :func:`engine_args`, scheduler and worker.
    """
    try:
        check_vllm_version()
    except UnsupportedError as error:
        logger.warning("%s: this vLLM is left as it is", error)
        return
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
        UnsupportedError: the installed vLLM is not a version that this package was built for,
            which matters in mode ``off`` too: :func:`register` has added nothing to it.
    """
    check_vllm_version()
    if config.mode == "off":
        return {}
    from vllm.platforms import current_platform

    return {
        "scheduler_cls": "vtoken.integration.vllm.scheduler.scheduler_for",
        "worker_cls": GPU_WORKER if current_platform.is_cuda() else CPU_WORKER,
        "block_size": DEFAULT_BLOCK_SIZE,
        "additional_config": {"vtoken": config.to_dict()},
    }
