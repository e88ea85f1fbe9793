"""Which attention kernel reads live tokens on which GPU; pure, and says why not.

Page-1 reads, by compute capability:

    8.x   Ampere, Ada   FlashInfer native, else Triton   FlashAttention 2 reads pages of 16
    9.0   Hopper        FlashAttention 3, FlashInfer native, Triton
    10.x  Blackwell     FlashAttention 4 (heads up to 128), FlashInfer native, Triton
    12.x  Blackwell     FlashInfer native, Triton        FlashAttention 2 there too
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vtoken.errors import UnsupportedError

_PACKAGE = "vtoken.integration.vllm"
_CLASSES = {
    "FLASH_ATTN": f"{_PACKAGE}.attention_gpu_flash.LiveFlashBackend",
    "FLASHINFER": f"{_PACKAGE}.attention_gpu_flashinfer.LiveFlashInferBackend",
    "TRITON_ATTN": f"{_PACKAGE}.attention_gpu_triton.LiveTritonBackend",
}
"""By vLLM's name, most preferred first."""

FLASHINFER_HEAD_SIZES = (64, 128, 256)
"""Head sizes of FlashInfer's native kernels."""

_PLAIN_CACHES = ("auto", "float16", "bfloat16")
_FP8_CACHES = ("fp8", "fp8_e4m3")
KV_CACHE_DTYPES = _PLAIN_CACHES + _FP8_CACHES
"""vLLM's names of caches that GPUs read live tokens from."""

_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class GpuFacts:
    """What is known of the machine.

    Attributes:
        capability: compute capability, ``(9, 0)`` is Hopper.
        flash_attn_version: that vLLM uses for this head size, or None.
        has_flashinfer: whether it is installed and can run.
    """

    capability: tuple[int, int]
    flash_attn_version: int | None
    has_flashinfer: bool


@dataclass(frozen=True)
class LayerFacts:
    """What is known of the model's attention layers.

    Attributes:
        head_size: numbers per head.
        kv_cache_dtype: vLLM's name of it.
        dtype: of the model, as torch names it.
        sliding_window, alibi, sinks: features that a row of live tokens cannot express, or that
            nobody proved.
    """

    head_size: int
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    sliding_window: bool = False
    alibi: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class BackendChoice:
    """The backend to register.

    Attributes:
        name: of vLLM's backend that ours stands in for.
        class_path: ours.
        rejected: backends that would have been preferred, and the reason against each.
    """

    name: str
    class_path: str
    rejected: dict[str, str]


def choose_gpu_backend(
    gpu: GpuFacts, layer: LayerFacts, requested: str | None = None
) -> BackendChoice:
    """The most preferred backend that can read live tokens.

    Args:
        gpu: the machine.
        layer: the model.
        requested: vLLM's name of a backend that the user asked for; no other is tried.

    Raises:
        UnsupportedError: none can; every reason is listed.
    """
    general = list(_general_reasons(gpu, layer))
    if general:
        raise UnsupportedError("vToken cannot read live tokens here: " + "; ".join(general))
    if requested is not None and requested not in _CLASSES:
        raise UnsupportedError(
            f"attention backend {requested} cannot read live tokens, only {', '.join(_CLASSES)}"
        )
    rejected: dict[str, str] = {}
    for name in _CLASSES if requested is None else [requested]:
        reason = _REASONS[name](gpu, layer)
        if reason is None:
            return BackendChoice(name, _CLASSES[name], rejected)
        rejected[name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    raise UnsupportedError(f"no attention backend can read live tokens here: {listed}")


def _general_reasons(gpu: GpuFacts, layer: LayerFacts) -> Iterator[str]:
    if gpu.capability < (8, 0):
        yield f"compute capability {_dotted(gpu)} is older than Ampere (8.0)"
    if layer.sliding_window:
        yield "a sliding window counts positions, a row counts live tokens"
    if layer.alibi:
        yield "ALiBi weighs distances between positions, a row has none"
    if layer.sinks:
        yield "learned attention sinks are not proven"
    if layer.kv_cache_dtype not in KV_CACHE_DTYPES:
        yield f"KV cache dtype {layer.kv_cache_dtype} is not proven"


def _flash_attn(gpu: GpuFacts, layer: LayerFacts) -> str | None:
    version = gpu.flash_attn_version
    if layer.dtype not in _HALVES:
        return f"{layer.dtype}, not one of {_HALVES}"
    if version not in (3, 4):
        return f"FlashAttention {version or 'is missing and 2'} reads pages of 16 tokens or more"
    if layer.kv_cache_dtype in _FP8_CACHES:
        return "fp8 is proven with TRITON_ATTN only"
    if version == 4 and layer.head_size > 128:
        return f"FlashAttention 4 reads heads of {layer.head_size} in pages of 128 tokens"
    if layer.head_size % 8 or layer.head_size > 256:
        return f"head size {layer.head_size}"
    return None


def _flashinfer(gpu: GpuFacts, layer: LayerFacts) -> str | None:
    if not gpu.has_flashinfer:
        return "FlashInfer is not installed, or cannot compile its kernels"
    if layer.dtype not in _HALVES:
        return f"{layer.dtype}, not one of {_HALVES}"
    if layer.kv_cache_dtype in _FP8_CACHES:
        return "fp8 is proven with TRITON_ATTN only"
    if layer.head_size not in FLASHINFER_HEAD_SIZES:
        return f"head size {layer.head_size}, not one of {FLASHINFER_HEAD_SIZES}"
    return None


def _triton(gpu: GpuFacts, layer: LayerFacts) -> str | None:
    if layer.kv_cache_dtype in _FP8_CACHES and gpu.capability < (8, 9):
        return f"fp8 needs compute capability 8.9, this is {_dotted(gpu)}"
    if layer.head_size < 32:
        return f"head size {layer.head_size}, at least 32"
    return None


_REASONS = {"FLASH_ATTN": _flash_attn, "FLASHINFER": _flashinfer, "TRITON_ATTN": _triton}


def _dotted(gpu: GpuFacts) -> str:
    return ".".join(map(str, gpu.capability))
