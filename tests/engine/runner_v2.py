"""Makes vLLM take Model Runner V2: without a GPU, Triton's interpreter runs its kernels.

Nothing of vToken is involved, and nothing falls back: a runner that is not V2 fails the tests.
"""

from __future__ import annotations

import os
from typing import Any


def use_runner_v2(*, asynchronous: bool) -> dict[str, Any]:
    """Call before vLLM is imported; the engine must live in this process.

    Its workers may live in others, if the program calls :func:`prepare_worker` in them.

    Args:
        asynchronous: schedule one step ahead of the outputs, as on GPUs. vLLM's CPU platform
            turns that off; here it is turned on again behind it.

    Returns:
        Further arguments of the engine.
    """
    if has_gpu():
        # TF32 would be further from the oracle than the tests allow.
        os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", TRITON_F32_DEFAULT="ieee")
        return {"async_scheduling": asynchronous}
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from tests.gpu_interp.interpreter import install

    install()
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    return {}


def prepare_worker() -> None:
    """Call where a worker's process begins: without the interpreter V2 could not be imported."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.gpu_interp.interpreter import install

        install()


def has_gpu() -> bool:
    """Whether the tests run on a GPU, as in ``scripts/gpu_check``."""
    import torch

    return torch.cuda.is_available()
