"""Paged views of every layout that vLLM 0.32 has address the tokens that vLLM means."""

import itertools

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vtoken.errors import UnsupportedError
from vtoken.kv_pages import PagedKV, families

HEADS, DIM, BLOCK, NUM_BLOCKS, NUM_LAYERS = 2, 8, 16, 3, 2
LAYOUTS = list(KVCacheLayout)


def make_views(layout, dtype=torch.bfloat16, kernel_block=BLOCK):
    """All layers' views as vLLM makes them, with random bytes."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=dtype)
    page = spec.page_size_bytes
    raw = torch.randint(0, 256, (page * NUM_BLOCKS * NUM_LAYERS,), dtype=torch.uint8)
    strides = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    tensor = KVCacheTensor(
        size=raw.numel(),
        layers=[f"layer.{i}" for i in range(NUM_LAYERS)],
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return create_kv_cache_views(
        raw.view(torch.int8), spec, NUM_BLOCKS, layout, tensor, kernel_block_size=kernel_block
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gather_reads_the_token_of_each_slot(layout):
    """Slot ``b * 16 + o`` is offset o of block b, all heads, whatever the order in memory."""
    for cache in make_views(layout):
        paged = PagedKV.from_cache(cache)
        assert paged.num_slots == NUM_BLOCKS * BLOCK
        words = paged.gather(torch.arange(paged.num_slots))
        for block, offset in itertools.product(range(NUM_BLOCKS), range(BLOCK)):
            expected = cache[block, :, offset].contiguous().view(torch.int32)
            assert torch.equal(words[block * BLOCK + offset], expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_scatter_writes_only_the_named_tokens(layout):
    """Other tokens, heads and layers keep their bytes."""
    first, second = make_views(layout)
    paged, other = PagedKV.from_cache(first), PagedKV.from_cache(second)
    everything = torch.arange(paged.num_slots)
    before, untouched = paged.gather(everything), other.gather(everything)
    paged.scatter(torch.tensor([17, 3]), before[[40, 41]])
    expected = before.clone()
    expected[[17, 3]] = before[[40, 41]]
    assert torch.equal(paged.gather(everything), expected)
    assert torch.equal(other.gather(everything), untouched)


def test_one_token_blocks_make_slot_and_page_the_same():
    """With kernel blocks of one token the layer-compact layouts are token-major."""
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
        for cache in make_views(layout, kernel_block=1):
            paged = PagedKV.from_cache(cache)
            assert cache.shape == (NUM_BLOCKS * BLOCK, HEADS, 1, 2 * DIM)
            assert paged.num_slots == NUM_BLOCKS * BLOCK
            assert cache.stride(1) == 2 * DIM


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=lambda layout: layout.name)
def test_vllm_refuses_one_token_blocks_in_the_other_layouts(layout):
    """Why page-1 reads name layouts: vLLM itself refuses the others."""
    with pytest.raises(ValueError, match="layer-compact layout"):
        make_views(layout, kernel_block=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_bytes_per_token_follow_the_dtype(dtype):
    """Keys and values of all heads."""
    cache = make_views(KVCacheLayout.LBNHC, dtype)[0]
    assert PagedKV.from_cache(cache).bytes_per_token == 2 * HEADS * DIM * cache.element_size()


def test_key_and_value_are_the_halves_of_the_content():
    """The key comes first."""
    cache = make_views(KVCacheLayout.LBNHC)[0]
    paged = PagedKV.from_cache(cache)
    assert paged.key.data_ptr() == cache.data_ptr()
    assert torch.equal(paged.value.view(torch.int16), cache[..., DIM:].view(torch.int16))


def test_families_group_layers_of_equal_strides():
    """Equal layers share one launch and keep their own addresses; others get their own."""
    equal = [PagedKV.from_cache(cache) for cache in make_views(KVCacheLayout.LBNHC)]
    other = PagedKV.from_cache(torch.zeros(4, HEADS, BLOCK, 4 * DIM, dtype=torch.bfloat16))
    together, alone = families([*equal, other])
    assert together.layers == tuple(equal)
    assert together.addresses.tolist() == [layer.words.data_ptr() for layer in equal]
    assert alone.layers == (other,)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(4, 2, 8), "blocks, heads, tokens"),
        (torch.zeros(4, 2, 16, 8).transpose(2, 3), "contiguous content"),
        (torch.zeros(4, 2, 16, 7), "key \\+ value"),
        (torch.zeros(4, 3, 5, 6, dtype=torch.uint8), "whole 4-byte words"),
    ],
    ids=["three axes", "content not last", "odd content", "not whole words"],
)
def test_other_tensors_are_refused_with_their_shape(cache, message):
    """The message says what was expected."""
    with pytest.raises(UnsupportedError, match=message):
        PagedKV.from_cache(cache)
