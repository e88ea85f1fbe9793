"""The picture of the pool: every block in its cell, counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.core_models import ModelPool, kill, make_layer, make_request
from vtoken.block_map import CACHED, block_map
from vtoken.token_layer import TokenLayer


def draw(layer: TokenLayer, pool: ModelPool, max_cells: int = 4096) -> dict:
    """The map of this layer over the model pool."""
    references = np.array(pool.ref, np.int32)
    for block in pool.hash_of_block:
        if not pool.ref[block]:
            references[block] = CACHED
    destinations = layer.reclamation.destinations_in_flight()
    return block_map(layer.requests.values(), references, destinations, pool.block_size, max_cells)


def test_empty_pool_is_all_free() -> None:
    """Nothing held, nothing live; every block has a cell of its own."""
    cells = draw(*make_layer())
    assert (cells["num_blocks"], cells["block_size"], cells["blocks_per_cell"]) == (32, 4, 1)
    for name in ("held", "live", "shared", "moving", "cached"):
        assert cells[name] == [0] * 32


def test_live_tokens_stand_at_their_block() -> None:
    """17 tokens in blocks 1 … 5, some of them evicted; the totals are the layer's."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [1, 2, 3, 6])
    cells = draw(layer, pool)
    assert cells["held"][:6] == [1, 1, 1, 1, 1, 0]
    assert cells["live"][:6] == [1, 3, 4, 4, 1, 0]
    assert sum(cells["live"]) == layer.occupancy.live_tokens
    assert sum(cells["held"]) == layer.occupancy.retained_blocks


def test_sources_and_destinations_of_a_relocation_are_moving() -> None:
    """Until it is settled; the destination is held and has no live token yet."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [token for token in range(1, 16) if token % 4])
    (plan,) = layer.plan_relocations([(kv, 17)])
    cells = draw(layer, pool)
    assert cells["moving"][:7] == [1, 1, 1, 1, 0, 1, 0]
    assert (cells["held"][5], cells["live"][5]) == (1, 0)
    layer.settle(plan.ticket, None)
    after = draw(layer, pool)
    assert sum(after["moving"]) == 0
    assert (after["held"][5], after["live"][5]) == (1, 4)


def test_destinations_of_a_request_that_ended_are_still_moving() -> None:
    """The worker may be writing to them."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=17)
    kill(layer, kv, [token for token in range(1, 16) if token % 4])
    layer.plan_relocations([(kv, 17)])
    layer.forget("a")
    pool.release("a")
    cells = draw(layer, pool)
    assert [i for i, n in enumerate(cells["held"]) if n] == [5]
    assert cells["moving"] == cells["held"]


def test_shared_block_counts_once_with_its_fullest_holder() -> None:
    """And what the prefix cache keeps after the last holder is free and cached."""
    layer, pool = make_layer(policy="none")
    make_request(layer, pool, "a", num_tokens=9)
    pool.cache_full_blocks("a", ["h0", "h1"])
    b = make_request(layer, pool, "b", num_tokens=9, hashes=["h0", "h1"])
    kill(layer, b, [0, 1, 4])
    cells = draw(layer, pool)
    assert cells["shared"][:4] == [1, 1, 0, 0]
    assert cells["live"][:4] == [4, 4, 1, 1]
    for name in ("a", "b"):
        layer.forget(name)
        pool.release(name)
    cells = draw(layer, pool)
    assert cells["cached"][:3] == [1, 1, 0]
    assert sum(cells["held"]) == 0


@pytest.mark.parametrize("max_cells", [1, 3, 5, 31, 32, 33])
def test_large_pools_are_summed_up_in_cells(max_cells: int) -> None:
    """At most so many cells, and no block is lost, the last cell being smaller."""
    layer, pool = make_layer(policy="none")
    kv = make_request(layer, pool, num_tokens=61)
    kill(layer, kv, [*range(1, 4), 9, 17])
    whole, cells = draw(layer, pool), draw(layer, pool, max_cells)
    assert len(cells["held"]) <= max_cells
    step = cells["blocks_per_cell"]
    for name in ("held", "live", "shared", "moving", "cached"):
        sums = [sum(whole[name][i : i + step]) for i in range(0, 32, step)]
        assert cells[name] == sums


def test_map_is_json() -> None:
    """Plain numbers, and few characters: it crosses two sockets."""
    layer, pool = make_layer(ModelPool(num_blocks=100_000), policy="none")
    make_request(layer, pool, num_tokens=64)
    text = json.dumps(draw(layer, pool))
    assert json.loads(text)["blocks_per_cell"] == 25
    assert len(text) < 100_000
