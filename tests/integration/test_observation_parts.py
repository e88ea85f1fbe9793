"""Observed requests are looked at in parts: each of them once, none above the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.integration.vllm.observation_parts import (
    ColumnBytes,
    ObservedRequests,
    packed,
    parts_by_queries,
)

COST = ColumnBytes(fixed=3, per_query=2)
SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=12)


def make_requests(sizes: list[tuple[int, int]]) -> ObservedRequests:
    """Of so many live tokens and observed queries, each in a batch of its queries alone."""
    num_queries = np.array([min(pair) for pair in sizes])
    return ObservedRequests(
        rows=np.arange(len(sizes))[::-1].copy(),
        lens=np.array([length for length, _ in sizes]),
        ends=np.cumsum(num_queries),
        num_queries=num_queries,
        in_prefill=np.arange(len(sizes)) % 2 == 0,
    )


def looked_at(parts: list[ObservedRequests]) -> list[tuple[int, int, int, bool]]:
    """Each query as row, place in the batch, tokens that it reads and phase, in this order."""
    return [
        (int(row), int(end) - back, int(length) - back, bool(in_prefill))
        for part in parts
        for row, length, end, num, in_prefill in zip(*vars(part).values(), strict=True)
        for back in range(num)[::-1]
    ]


def padded_bytes(part: ObservedRequests) -> int:
    """What it takes with every row as long as its longest."""
    (num_queries,) = set(part.num_queries.tolist())
    return int(len(part.rows) * part.lens.max() * COST.of(num_queries))


@given(SIZES, st.integers(1, 2000))
def test_parts_hold_every_query_once_and_stay_below_the_limit(sizes, limit):
    """Only one query over one row may exceed it; a request's queries keep their order."""
    requests = make_requests(sizes)
    parts = parts_by_queries(requests, COST, limit)
    found = looked_at(parts)
    assert sorted(found) == sorted(looked_at([requests]))
    for row in requests.rows:
        places = [place for r, place, *_ in found if r == row]
        assert places == sorted(places)
    for part in parts:
        assert len(set(part.rows)) == len(part.rows)
        alone = len(part.rows) == 1 and part.num_queries[0] == 1
        assert alone or padded_bytes(part) <= limit


def test_requests_that_fit_stay_together_in_the_order_of_the_batch():
    """One part per number of queries, the most queries last."""
    requests = make_requests([(30, 2), (9, 1), (20, 2), (50, 1)])
    parts = parts_by_queries(requests, COST, 10_000)
    assert [part.rows.tolist() for part in parts] == [[2, 0], [3, 1]]
    assert [part.num_queries.tolist() for part in parts] == [[1, 1], [2, 2]]


def test_a_long_row_does_not_stretch_short_ones():
    """255 rows of up to 40 columns fit together; the long one goes alone."""
    lens = np.full(256, 40)
    lens[7] = 131_072
    short, long = packed(lens, 4, 1 << 20)
    assert long.tolist() == [7]
    assert short.tolist() == [i for i in range(256) if i != 7]


@pytest.mark.parametrize("limit", [1, 100, 200, 10_000])
def test_packed_rows_are_bounded_and_each_is_there(limit):
    """A row above the limit is alone; no rows give no parts."""
    lens = np.array([5, 90, 17, 17, 3, 60])
    parts = list(packed(lens, 2, limit))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lens)))
    assert all(len(p) == 1 or len(p) * lens[p].max() * 2 <= limit for p in parts)
    assert not list(packed(lens[:0], 2, limit))


def test_a_window_above_the_limit_is_cut_between_its_queries():
    """Seven queries over 50 tokens, three at once: earlier ones read fewer tokens."""
    requests = make_requests([(50, 7), (4, 1)])
    parts = parts_by_queries(requests, COST, 50 * COST.of(3))
    assert [part.num_queries.tolist() for part in parts] == [[3], [3], [1], [1]]
    assert [part.lens.tolist() for part in parts] == [[46], [49], [50], [4]]
    assert [part.ends.tolist() for part in parts] == [[3], [6], [7], [8]]
