"""Slot views of the CPU cache against the layout that vLLM's own kernels use."""

import numpy as np
import pytest
import torch

from vtoken.errors import UnsupportedError
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SlotGeometry, SplitKV

BLOCKS, HEADS, SIZE, DIM = 5, 3, 4, 8


def make_cache(dtype=torch.float32, blocks=BLOCKS):
    numbers = torch.arange(blocks * HEADS * SIZE * 2 * DIM, dtype=torch.float32)
    return numbers.view(blocks, HEADS, SIZE, 2 * DIM).to(dtype)


def make_layers(num_layers, dtype=torch.float32, gap=0):
    """Layers in one allocation, as vLLM makes them, optionally with rows between them."""
    one = BLOCKS * HEADS * SIZE * 2 * DIM
    backing = torch.randn(num_layers * (one + gap)).to(dtype)
    shape = (BLOCKS, HEADS, SIZE, 2 * DIM)
    starts = range(0, num_layers * (one + gap), one + gap)
    return [backing[start : start + one].view(shape) for start in starts]


def stock_kv(cache, slot):
    """K and V ``[H, D]`` of a canonical slot, read as vLLM's CPU backend splits its cache."""
    blocks, heads, size, _ = cache.shape
    key, value = cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    return key[slot // size, :, slot % size], value[slot // size, :, slot % size]


def test_views_show_the_keys_and_values_of_the_stock_layout():
    """Every slot reads the same numbers through our views as through vLLM's."""
    cache = make_cache()
    views = SplitKV.from_cache(cache)
    for slot in range(views.num_slots):
        kernel = int(views.geometry.kernel_slots(np.array([slot], np.int32))[0])
        key, value = stock_kv(cache, slot)
        assert torch.equal(views.key[kernel], key)
        assert torch.equal(views.value[kernel], value)


def test_views_share_memory_with_the_cache():
    """A write through rows is seen by the cache; nothing was copied."""
    cache = make_cache()
    views = SplitKV.from_cache(cache)
    views.rows.fill_(7)
    assert (cache == 7).all()
    assert views.key.stride() == (DIM, 2 * SIZE * DIM, 1)


def test_views_respect_the_storage_offset():
    """Layers that lie inside a larger allocation are addressed from their own start."""
    layers = make_layers(3)
    views = SplitKV.from_cache(layers[1])
    key, value = stock_kv(layers[1], 9)
    kernel = int(views.geometry.kernel_slots(np.array([9]))[0])
    assert torch.equal(views.key[kernel], key)
    assert torch.equal(views.value[kernel], value)


def test_kernel_slots_round_trip_in_numpy_and_torch():
    """Both directions agree for both libraries and keep the type."""
    geometry = SlotGeometry(SIZE, HEADS, DIM)
    slots = np.arange(BLOCKS * SIZE, dtype=np.int32)
    kernel = geometry.kernel_slots(slots)
    assert kernel.dtype == np.int32
    assert np.array_equal(geometry.canonical_slots(kernel), slots)
    as_tensor = geometry.kernel_slots(torch.from_numpy(slots))
    assert np.array_equal(as_tensor.numpy(), kernel)


def test_key_rows_address_one_row_per_token_and_head():
    """Row indices for the cache write, values exactly one block size further."""
    cache = make_cache()
    views = SplitKV.from_cache(cache)
    slots = torch.tensor([6, 1, 19])
    rows = views.geometry.key_rows(slots)
    keys = torch.stack([stock_kv(cache, int(s))[0] for s in slots])
    values = torch.stack([stock_kv(cache, int(s))[1] for s in slots])
    assert torch.equal(views.rows[rows].view(3, HEADS, DIM), keys)
    assert torch.equal(views.rows[rows + SIZE].view(3, HEADS, DIM), values)


def test_token_rows_partition_the_cache():
    """All rows of all slots are every row of the layer, each once."""
    views = SplitKV.from_cache(make_cache())
    rows = views.geometry.token_rows(torch.arange(views.num_slots))
    assert rows.shape == (BLOCKS * SIZE, 2 * HEADS)
    assert torch.equal(rows.flatten().sort().values, torch.arange(len(views.rows)))


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, HEADS, SIZE),
        torch.zeros(2, HEADS, SIZE, 7),
        torch.zeros(2, SIZE, HEADS, 2 * DIM).transpose(1, 2),
    ],
    ids=["three dimensions", "odd width", "token-major"],
)
def test_foreign_layouts_are_refused_with_the_shape(cache):
    """A layout that the views would misread is refused, with its shape."""
    with pytest.raises(UnsupportedError, match=r"2 \* head_size.*got shape"):
        SplitKV.from_cache(cache)


def test_pools_beyond_int32_slots_are_refused():
    """A pool whose rows int32 cannot number is refused before anything wraps around."""
    blocks = 2**31 // (2 * SIZE * HEADS) + 1
    huge = torch.empty(blocks, HEADS, SIZE, 2, device="meta")
    with pytest.raises(UnsupportedError, match="2147483647"):
        SplitKV.from_cache(huge)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_pool_copies_whole_tokens_in_every_layer(dtype):
    """Destinations get the source's K/V in all layers; no other byte changes."""
    layers = make_layers(3, dtype)
    before = [layer.clone() for layer in layers]
    pool = KVPool([SplitKV.from_cache(layer) for layer in layers])
    src, dst = [17, 2, 3], [8, 0, 11]
    num_bytes = pool.copy(torch.tensor(src), torch.tensor(dst))
    assert num_bytes == 3 * 3 * 2 * HEADS * DIM * layers[0].element_size()
    for layer, old in zip(layers, before, strict=True):
        for slot in range(BLOCKS * SIZE):
            origin = src[dst.index(slot)] if slot in dst else slot
            for now, then in zip(stock_kv(layer, slot), stock_kv(old, origin), strict=True):
                assert torch.equal(now, then)


@pytest.mark.parametrize("gap", [0, 3 * DIM, 3], ids=["dense", "whole rows between", "odd gap"])
def test_pool_serves_layers_however_they_are_allocated(gap):
    """One arena, strided arenas and layers that share no row grid give the same digest."""
    layers = make_layers(2, gap=gap)
    apart = [layer.clone() for layer in layers]
    slots = torch.tensor([5, 0, 13])
    together = KVPool([SplitKV.from_cache(layer) for layer in layers])
    assert together.bytes_per_token == 2 * 2 * HEADS * DIM * 4
    assert together.digest(slots) == KVPool([SplitKV.from_cache(layer) for layer in apart]).digest(
        slots
    )


def test_digest_depends_on_contents_and_order_only():
    """A relocation keeps the digest; another order or one changed bit does not."""
    layers = make_layers(2, torch.bfloat16)
    pool = KVPool([SplitKV.from_cache(layer) for layer in layers])
    src, dst = torch.tensor([4, 9, 2]), torch.tensor([16, 17, 18])
    digest = pool.digest(src)
    pool.copy(src, dst)
    assert pool.digest(dst) == digest
    assert pool.digest(src.flip(0)) != digest
    layers[1].view(torch.int16)[4, 0, 1, 0] ^= 1
    assert pool.digest(dst) != digest


def test_large_batches_are_staged_in_parts(monkeypatch):
    """A batch beyond the staging limit is split and still copied completely."""
    monkeypatch.setattr("vtoken.kv_pool._STAGING_BYTES", 1)
    layers = make_layers(2)
    pool = KVPool([SplitKV.from_cache(layer) for layer in layers])
    src, dst = torch.arange(8), torch.arange(8, 16)
    digest = pool.digest(src)
    pool.copy(src, dst)
    assert pool.digest(dst) == digest
