"""The kernel that reads live tokens follows the GPU's generation; refusals say why."""

import pytest

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_gpu_choice import (
    GpuFacts,
    LayerFacts,
    choose_gpu_backend,
)

AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
FA = {AMPERE: 2, ADA: 2, HOPPER: 3, BLACKWELL: 4, CONSUMER: 2}


def choose(capability, requested=None, flashinfer=True, **layer):
    """The choice for heads of 128 unless told otherwise."""
    gpu = GpuFacts(capability, FA[capability], flashinfer)
    return choose_gpu_backend(gpu, LayerFacts(**{"head_size": 128} | layer), requested)


@pytest.mark.parametrize(
    ("capability", "flashinfer", "layer", "name"),
    [
        (AMPERE, True, {}, "FLASHINFER"),
        (AMPERE, False, {}, "TRITON_ATTN"),
        (ADA, True, {"head_size": 96}, "TRITON_ATTN"),
        (ADA, True, {"kv_cache_dtype": "fp8"}, "TRITON_ATTN"),
        (HOPPER, True, {}, "FLASH_ATTN"),
        (HOPPER, True, {"head_size": 256}, "FLASH_ATTN"),
        (HOPPER, True, {"kv_cache_dtype": "fp8"}, "TRITON_ATTN"),
        (HOPPER, True, {"dtype": "float32"}, "TRITON_ATTN"),
        (BLACKWELL, True, {}, "FLASH_ATTN"),
        (BLACKWELL, True, {"head_size": 256}, "FLASHINFER"),
        (BLACKWELL, False, {"head_size": 192}, "TRITON_ATTN"),
        (CONSUMER, True, {}, "FLASHINFER"),
    ],
)
def test_choice_follows_generation_head_size_and_cache(capability, flashinfer, layer, name):
    """The table of the module, and its consequences."""
    choice = choose(capability, flashinfer=flashinfer, **layer)
    assert choice.name == name
    assert choice.class_path.startswith("vtoken.integration.vllm.attention_gpu_")


def test_rejected_backends_come_with_their_reason():
    """So that a log line can say why the faster kernel is not in use."""
    rejected = choose(AMPERE, flashinfer=False).rejected
    assert rejected["FLASH_ATTN"] == "FlashAttention 2 reads pages of 16 tokens or more"
    assert "not installed" in rejected["FLASHINFER"]


def test_a_requested_backend_is_taken_or_refused():
    """A user's wish is not replaced by another backend."""
    assert choose(HOPPER, "TRITON_ATTN").name == "TRITON_ATTN"
    with pytest.raises(UnsupportedError, match="FlashAttention 2 reads pages of 16"):
        choose(AMPERE, "FLASH_ATTN")
    with pytest.raises(UnsupportedError, match="attention backend FLEX_ATTENTION cannot"):
        choose(HOPPER, "FLEX_ATTENTION")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ({"sliding_window": True}, "sliding window"),
        ({"alibi": True}, "ALiBi"),
        ({"sinks": True}, "learned attention sinks"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2 is not proven"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head is not proven"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4 is not proven"),
    ],
)
def test_layers_that_rows_cannot_express_are_refused(layer, reason):
    """On every GPU, with every backend."""
    with pytest.raises(UnsupportedError, match=reason):
        choose(HOPPER, **layer)


def test_old_gpus_are_refused_with_their_capability():
    """Turing is older than what was proven."""
    gpu = GpuFacts((7, 5), 2, True)
    with pytest.raises(UnsupportedError, match=r"7\.5 is older than Ampere"):
        choose_gpu_backend(gpu, LayerFacts(64))


def test_every_reason_is_listed_when_nothing_fits():
    """Ampere has no fp8 kernel at all."""
    with pytest.raises(UnsupportedError) as error:
        choose(AMPERE, kv_cache_dtype="fp8")
    for name in ("FLASH_ATTN:", "FLASHINFER:", "TRITON_ATTN: fp8 needs compute capability 8.9"):
        assert name in str(error.value)
