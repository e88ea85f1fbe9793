"""The parts of the GPU path fit together; the engine test of the GPU path runs them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.integration.vllm.gpu_core import TokenPages, logit_scale


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
    ("cache", "soft_cap", "expected"),
    [("auto", None, (0.125, 0.0)), ("bfloat16", 30.0, (0.125, 30.0)), ("fp8", 0, (0.25, 0.0))],
)
def test_logits_are_scaled_as_in_the_layer(cache, soft_cap, expected):
    """Keys of an fp8 cache come with a factor."""
    impl = SimpleNamespace(scale=0.125, kv_cache_dtype=cache, logits_soft_cap=soft_cap)
    scale = logit_scale(SimpleNamespace(impl=impl, _k_scale_float=2.0))
    assert (scale.scale, scale.soft_cap) == expected
