"""The paged pool copies and hashes whole tokens over all layers."""

import pytest
import torch

from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool

BLOCKS, HEADS, SIZE, DIM = 6, 2, 4, 8


def make_layers(num=3, width=2 * DIM):
    """Layers with random contents."""
    backing = torch.randn(num, BLOCKS, HEADS, SIZE, width).to(torch.bfloat16)
    return [PagedKV.from_cache(layer) for layer in backing]


def test_copy_moves_tokens_in_every_layer():
    """Destinations get the sources' bytes, nothing else changes; bytes are counted."""
    layers = make_layers()
    pool = PagedPool(layers)
    before = [layer.gather(torch.arange(pool.num_slots)) for layer in layers]
    src, dst = torch.tensor([1, 9, 17]), torch.tensor([20, 2, 23])
    assert pool.copy(src, dst) == 3 * pool.bytes_per_token
    for layer, old in zip(layers, before, strict=True):
        expected = old.clone()
        expected[dst] = old[src]
        assert torch.equal(layer.gather(torch.arange(pool.num_slots)), expected)


def test_layers_of_different_shapes_share_a_pool():
    """Each family is moved by its own call."""
    layers = [*make_layers(2), *make_layers(1, width=4 * DIM)]
    calls = []
    pool = PagedPool(layers, lambda family, src, dst: calls.append(len(family.layers)))
    pool.copy(torch.tensor([1]), torch.tensor([2]))
    assert calls == [2, 1]
    assert pool.bytes_per_token == HEADS * 2 * (2 * 2 * DIM + 4 * DIM)


def test_empty_batches_reach_no_mover():
    """No launch for nothing."""
    nothing = torch.zeros(0, dtype=torch.int64)
    pool = PagedPool(make_layers(), lambda *_: pytest.fail("was called"))
    assert pool.copy(nothing, nothing) == 0


def test_large_batches_are_staged_in_parts(monkeypatch):
    """A gather never holds more than the staging bytes."""
    monkeypatch.setattr("vtoken.paged_pool._STAGING_BYTES", 1)
    layers = make_layers()
    pool = PagedPool(layers)
    src, dst = torch.arange(5), torch.arange(10, 15)
    digest = pool.digest(src)
    pool.copy(src, dst)
    assert pool.digest(dst) == digest


def test_digest_depends_on_contents_and_order_only():
    """Moved tokens hash alike; swapped or changed ones do not."""
    layers = make_layers()
    pool = PagedPool(layers)
    tokens = torch.tensor([3, 8])
    digest = pool.digest(tokens)
    pool.copy(tokens, torch.tensor([20, 21]))
    assert pool.digest(torch.tensor([20, 21])) == digest
    assert pool.digest(torch.tensor([21, 20])) != digest
    layers[2].words[5, 1, 1, 0] ^= 1
    assert pool.digest(torch.tensor([20, 21])) != digest
