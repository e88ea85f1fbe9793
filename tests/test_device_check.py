"""The proofs of a device hold on a right one and fail on each kind of wrong one."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check.copies import LAYOUTS, make_layers
from benchmarks.gpu_check.machine import SMALL
from vtoken.copy_engine.cuda import CudaCopyEngine
from vtoken.device_check import (
    NOT_A_NUMBER,
    Finding,
    check_copies,
    check_order,
    dense_attention,
    poison,
    refuse_failed,
)
from vtoken.errors import UnsupportedError
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool, move_by_index

_spec = importlib.util.spec_from_file_location(
    "fake_streams", Path(__file__).parent / "copy_engine" / "fake_streams.py"
)
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)


def make(mover=move_by_index, layout="LBNHC", page=1):
    """Two layers of bf16 and the engine of a GPU over them."""
    caches = make_layers(SMALL, layout, torch.bfloat16, torch.device("cpu"), page)
    pool = PagedPool([PagedKV.from_cache(cache) for cache in caches], mover)
    return pool, CudaCopyEngine(pool, fakes.FakeStreams())


def failed(mover):
    """Names of the proofs that fail."""
    findings = [*check_copies(*make(mover), 40), check_order(*make(mover), 4, 20)]
    return [finding.name for finding in findings if not finding.ok]


WRONG = "words that the relocation kernel got wrong"
TOUCHED = "words that it must not touch and did"
LATE = "reads that overtook a copy"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_mover_passes_in_every_layout(layout):
    """And what was used is zero afterwards."""
    pool, engine = make(layout=layout, page=16)
    before = [layer.words.count_nonzero() for layer in pool.layers]
    findings = [*check_copies(pool, engine, 40), check_order(pool, engine, 4, 20)]
    assert [finding.value for finding in findings] == [0.0] * 4
    after = [layer.words.count_nonzero() for layer in pool.layers]
    assert all(a < b for a, b in zip(after, before, strict=True))
    words = 40 * SMALL.num_layers * SMALL.num_kv_heads * SMALL.head_size
    assert findings[0].note == f"of {words} words"


def test_a_mover_that_copies_nothing_is_caught():
    """In a batch, and in the order of batches."""
    assert failed(lambda family, src, dst: None) == [WRONG, LATE]


def test_a_mover_that_is_off_by_one_is_caught():
    """It read the neighbour of each source."""
    assert failed(lambda f, src, dst: move_by_index(f, (src + 1) % f.layers[0].num_slots, dst))


def test_a_mover_that_misses_the_last_token_is_caught():
    """One of 40 is enough."""
    assert WRONG in failed(lambda f, src, dst: move_by_index(f, src[:-1], dst[:-1]))


def test_a_mover_that_misses_a_layer_is_caught():
    """Its tokens are checked in every layer."""

    def first_layer(family, src, dst):
        family.layers[0].scatter(dst, family.layers[0].gather(src))

    assert WRONG in failed(first_layer)


def test_a_mover_that_writes_beside_its_destination_is_caught():
    """Neighbours of the destinations are looked at."""

    def wide(family, src, dst):
        beside = (dst + 1) % family.layers[0].num_slots
        move_by_index(family, src, beside)
        move_by_index(family, src, dst)

    assert TOUCHED in failed(wide)


def test_a_mover_that_raises_is_a_failed_proof():
    """The batch is reported as refused, with the reason."""

    def broken(family, src, dst):
        raise RuntimeError("no kernel image is available")

    found = {f.name: f for f in check_copies(*make(broken), 40)}
    assert found["batches refused"].value == 1
    assert "no kernel image" in found["batches refused"].note


def test_a_copy_that_comes_a_round_late_is_caught():
    """It carries the number of the round before."""
    waiting = []

    def late(family, src, dst):
        if waiting:
            held = waiting.pop()
            for layer, words in zip(family.layers, held, strict=True):
                layer.scatter(dst, words)
        waiting.append([layer.gather(src) for layer in family.layers])

    assert not check_order(*make(late), 4, 20).ok


@pytest.mark.parametrize(("num_queries", "soft_cap"), [(1, 0.0), (5, 0.0), (7, 20.0)])
def test_dense_attention_is_causal_over_live_tokens(num_queries, soft_cap):
    """Each query sees the tokens up to its own, two heads share keys."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(num_queries, 4, 8, generator=generator)
    key, value = (torch.randn(7, 2, 8, generator=generator) for _ in range(2))
    found = dense_attention(query, key, value, 0.3, soft_cap)
    for i in range(num_queries):
        seen = 7 - num_queries + i + 1
        for head in range(4):
            logits = (key[:seen, head // 2].double() @ query[i, head].double()) * 0.3
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            expected = logits.softmax(0) @ value[:seen, head // 2].double()
            torch.testing.assert_close(found[i, head].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", NOT_A_NUMBER)
def test_poison_is_not_a_number_where_it_was_put(dtype):
    """In every dtype of a cache; other slots keep what they hold."""
    cache = torch.ones(6, 2, 1, 8).to(dtype)
    layer = PagedKV.from_cache(cache)
    poison(layer, torch.tensor([1, 4]))
    assert cache.float().isnan().all((1, 2, 3)).tolist() == [False, True, False, False, True, False]
    assert not cache[0].float().isnan().any()
    poison(layer)
    assert cache.float().isnan().all()


def test_a_cache_of_unknown_numbers_is_refused():
    """Rather than checked with something that is a number in it."""
    with pytest.raises(UnsupportedError, match="int8"):
        poison(PagedKV.from_cache(torch.zeros(4, 2, 1, 8, dtype=torch.int8)))


def test_nan_never_passes():
    """Nor does what is above its limit."""
    assert Finding("exact", 0.0).ok
    assert not Finding("off", 1.0, 0.5).ok
    assert not Finding("strange", math.nan, 0.5).ok


def test_a_refusal_names_what_failed_with_its_numbers():
    """And nothing else; all right is silence."""
    right = Finding("copies", 0.0)
    refuse_failed([right])
    with pytest.raises(UnsupportedError) as refused:
        refuse_failed([right, Finding("reads", 0.75, 0.05, "of 8"), Finding("scores", math.nan)])
    text = str(refused.value)
    assert "failed 2 of 3 checks" in text
    assert "reads: 0.75 (limit 0.05, of 8)" in text
    assert "scores: nan" in text
    assert "copies" not in text
    assert "--vtoken-mode off" in text
