"""The only place that touches private names of vLLM; everything else uses public ones.

A new vLLM version is adopted here: read the diff of the names below, move the pin, run the
oracle. Until then :func:`check_vllm_version` refuses it rather than risk silent corruption.
"""

from __future__ import annotations

from vtoken.errors import UnsupportedError

SUPPORTED_VLLM = "0.32"
"""The minor version whose internals the adapters were written against."""


def check_vllm_version(version: str | None = None) -> None:
    """Refuse a vLLM that the adapters were not written for.

    Args:
        version: defaults to that of the installed vLLM.

    Raises:
        UnsupportedError: not a 0.32.x; names both versions.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    if version.split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise UnsupportedError(f"vToken supports vLLM {SUPPORTED_VLLM}.x, found {version}")
