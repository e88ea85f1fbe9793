"""Makes vLLM take a generation of model runners; without a GPU an interpreter runs V2's kernels.

Nothing of vToken is involved, and nothing falls back: a runner that is another one fails the tests.
"""

from __future__ import annotations

import os
from typing import Any

SWITCH = "VTOKEN_TEST_RUNNER"
"""The runner of all engines, ``v1`` or ``v2``, whatever their tests ask for: scripts/gpu_check."""


def runner_of(spec: dict[str, Any]) -> str:
    """What the switch says, else the specification, else what vLLM's CPU engine takes."""
    return os.environ.get(SWITCH) or str(spec.get("runner", "v1"))


def use_runner(spec: dict[str, Any]) -> dict[str, Any]:
    """Call before vLLM is imported.

    Args:
        spec: of the engine; ``async``: one step ahead of the outputs, by default if it asks for V2.

    Returns:
        Further arguments of the engine.
    """
    asynchronous = spec.get("async", spec.get("runner") == "v2")
    is_v2 = runner_of(spec) == "v2"
    if has_gpu():
        # TF32 would be further from the oracle than the tests allow.
        os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1" if is_v2 else "0", TRITON_F32_DEFAULT="ieee")
        return {"async_scheduling": asynchronous}
    return use_runner_v2(asynchronous=asynchronous) if is_v2 else {}


def use_runner_v2(*, asynchronous: bool) -> dict[str, Any]:
    """V2 without a GPU. Call before vLLM is imported; the engine must live in this process.

    Its workers may live in others, if the program calls :func:`prepare_worker` in them.

    Args:
        asynchronous: schedule one step ahead of the outputs, as on GPUs. vLLM's CPU platform
            turns that off; here it is turned on again behind it.

    Returns:
        Further arguments of the engine.
    """
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
