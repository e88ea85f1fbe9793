"""LiveIndex: ranks and tokens of many requests against listing what lives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.live_index import LiveIndex
from vtoken.occupancy import BlockOccupancy
from vtoken.request_kv import RequestKV


def make_requests(
    lengths: list[int], block_size: int, share: float, seed: int
) -> tuple[BlockOccupancy, list[RequestKV]]:
    """Requests of these lengths that have lost a share of their tokens."""
    rng, occupancy, requests = np.random.default_rng(seed), BlockOccupancy(9999, block_size), []
    for i, length in enumerate(lengths):
        kv = RequestKV(str(i), occupancy.store, occupancy.new_request(), length, 0, length)
        num_blocks = -(-length // block_size)
        kv.blocks.extend(np.arange(1, num_blocks + 1, dtype=np.int32))
        kv.add_tokens(length)
        dead = np.flatnonzero(rng.random(length) < share)
        occupancy.store.mark_dead(np.array([kv.row]), np.array([len(dead)]), dead)
        requests.append(kv)
    return occupancy, requests


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    share=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 99),
)
def test_every_live_token_is_found(
    lengths: list[int], block_size: int, share: float, seed: int
) -> None:
    """The k-th live token of each request, and how many live below any id."""
    occupancy, requests = make_requests(lengths, block_size, share, seed)
    index = LiveIndex(occupancy.store, np.array([kv.row for kv in requests]))
    live = [kv.table.live_ids() for kv in requests]
    counts = np.array([len(ids) for ids in live])
    who = np.arange(len(requests)).repeat(counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    assert index.token(who, ranks).tolist() == np.concatenate(live).tolist()
    ids = [np.arange(length + 1) for length in lengths]
    who = np.arange(len(requests)).repeat([len(part) for part in ids])
    expected = [part.searchsorted(wanted) for part, wanted in zip(live, ids, strict=True)]
    found = index.rank(who, np.concatenate(ids))
    assert found.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128])
def test_last_token_of_the_last_group(num_tokens: int) -> None:
    """The end of the last group is no token, and its rank is the number of live tokens."""
    occupancy, (kv,) = make_requests([num_tokens], 16, 0.0, 0)
    index = LiveIndex(occupancy.store, np.array([kv.row]))
    nobody = np.zeros(1, np.int64)
    assert index.rank(nobody, np.array([num_tokens])).tolist() == [num_tokens]
    assert index.token(nobody, np.array([num_tokens - 1])).tolist() == [num_tokens - 1]
