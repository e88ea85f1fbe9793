"""The parts of the GPU path fit together; the engine test of the GPU path runs them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.integration.vllm.gpu_core import TokenPages, as_numbers, logit_scale


@pytest.mark.parametrize("slots", [np.arange(5, dtype=np.int32), torch.arange(5)])
def test_pages_of_one_token_number_slots_as_the_scheduler_does(slots):
    """Both ways, in memory of their own: rows are views of a table that changes."""
    pages = TokenPages(16)
    assert pages.block_size == 16
    for numbered in (pages.kernel_slots(slots), pages.canonical_slots(slots)):
        assert numbered.dtype == slots.dtype
        assert numbered.tolist() == slots.tolist()
        numbered[0] = 9
        assert int(slots[0]) == 0


@pytest.mark.parametrize(
    ("cache", "soft_cap", "quantised", "expected"),
    [
        ("auto", None, False, (0.125, 0.0)),
        ("bfloat16", 30.0, False, (0.125, 30.0)),
        ("fp8", 0, False, (0.25, 0.0)),
        ("fp8", 0, True, (0.75, 0.0)),
    ],
)
def test_logits_are_scaled_as_in_the_layer(cache, soft_cap, quantised, expected):
    """Keys of an fp8 cache come with a factor, and queries where vLLM quantises them too."""
    impl = SimpleNamespace(scale=0.125, kv_cache_dtype=cache, logits_soft_cap=soft_cap)
    layer = SimpleNamespace(
        impl=impl,
        _k_scale_float=2.0,
        _q_scale_float=3.0,
        query_quant=object() if quantised else None,
    )
    scale = logit_scale(layer)
    assert (scale.scale, scale.soft_cap) == expected


@pytest.mark.parametrize(
    ("stored", "name", "held"),
    [
        (torch.uint8, "fp8", torch.float8_e4m3fn),
        (torch.uint8, "fp8_e4m3", torch.float8_e4m3fn),
        (torch.float8_e4m3fn, "fp8", torch.float8_e4m3fn),
        (torch.bfloat16, "auto", torch.bfloat16),
    ],
)
def test_bytes_of_an_fp8_cache_are_seen_as_numbers(stored, name, held):
    """Scores read keys as what they stand for; the memory is the same."""
    cache = torch.zeros(4, 2, 1, 16, dtype=stored)
    numbers = as_numbers(cache, name)
    assert numbers.dtype == held
    assert numbers.data_ptr() == cache.data_ptr()
