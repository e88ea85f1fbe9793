"""TableStore: regions are disjoint, grow with their content, and come back clean."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vtoken.errors import TokenTableError
from vtoken.table_store import GROUP, NEVER, NOBODY, REGION_BLOCKS, TableStore, ragged


def region(store: TableStore, row: int) -> range:
    """The blocks of a row's region."""
    first = int(store.first_block[row])
    return range(first, first + int(store.num_reserved[row]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_life_of_regions(seed: int, block_size: int) -> None:
    """Rows come, grow and go: nobody sees another's blocks, and what was written stays."""
    rng, store = random.Random(seed), TableStore(block_size)
    marks: dict[int, int] = {}
    for step in range(1, 400):
        if not marks or rng.random() < 0.3:
            marks[store.add_row()] = 0
        row = rng.choice(list(marks))
        if rng.random() < 0.2:
            store.release_row(row)
            del marks[row]
            continue
        blocks = region(store, row)
        store.block_id[blocks.start] = store.slot[blocks.start * block_size] = marks[row] = step
        store.reserve(row, rng.randint(1, 5 * REGION_BLOCKS))
    taken: set[int] = set()
    for row, mark in marks.items():
        blocks = region(store, row)
        assert not taken & set(blocks)
        taken |= set(blocks)
        assert blocks.start * block_size % GROUP == 0
        assert store.block_id[blocks.start] == store.slot[blocks.start * block_size] == mark
        assert not store.block_id[blocks.start + 1 : blocks.stop].any()
    free = np.setdiff1d(np.arange(len(store.block_id)), list(taken))
    assert not store.block_id[free].any()
    for row in marks:
        store.release_row(row)
    assert store._free[store._num_regions] == {0}, "all regions join again"


def test_rows_of_nobody_are_never_due() -> None:
    """Neither before a request comes nor after it is gone."""
    store = TableStore(4)
    rows = [store.add_row() for _ in range(5)]
    assert NOBODY not in rows
    assert (store.next_evict_at[rows] == 0).all()
    for row in rows[:3]:
        store.release_row(row)
    assert np.count_nonzero(store.num_tokens >= store.next_evict_at) == 2


def test_memory_is_there_from_the_start() -> None:
    """No array is replaced while requests have as many blocks as were expected."""
    store = TableStore(16, 1000)
    slots = store.slot
    for _ in range(3):
        store.reserve(store.add_row(), 250)
    assert store.slot is slots
    assert store.next_evict_at[NOBODY] == NEVER


def filled(store: TableStore, num_tokens: int) -> int:
    """A row with live tokens in slots 0, 1, …"""
    row = store.add_row()
    store.num_tokens[row] = store.num_live[row] = num_tokens
    store.slot[store.tokens_of(row)] = np.arange(num_tokens)
    store.live[store.tokens_of(row)] = True
    return row


def test_tokens_of_many_requests_die_together() -> None:
    """Each counts for its own request and group."""
    store = TableStore(16)
    rows = np.array([filled(store, 200), filled(store, 100)])
    first = store.first_block[rows] * 16 // GROUP
    slots = store.mark_dead(rows, np.array([3, 1]), np.array([0, 70, 71, 70]))
    assert slots.tolist() == [0, 70, 71, 70]
    assert store.num_live[rows].tolist() == [197, 99]
    assert store.group_live[first[0] : first[0] + 3].tolist() == [-1, -2, 0]
    assert store.group_live[first[1] : first[1] + 2].tolist() == [0, -1]
    assert not store.live[int(first[1]) * GROUP + 70]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5, 100], "token 100 is outside 0 … 99"),
        ([5, -1], "token -1 is outside"),
        ([5, 7], "token 7 is already dead"),
        ([5, 5], "3 ids to evict, only 2 distinct"),
    ],
)
def test_nobody_loses_tokens_if_one_request_cannot(token_ids: list[int], message: str) -> None:
    """All or nothing, over all requests."""
    store = TableStore(16)
    rows = np.array([filled(store, 50), filled(store, 100)])
    store.mark_dead(rows[1:], np.array([1]), np.array([7]))
    with pytest.raises(TokenTableError, match=message):
        store.mark_dead(rows, np.array([1, 2]), np.array([0, *token_ids]))
    assert store.num_live[rows].tolist() == [50, 99]


def test_ragged_ranges() -> None:
    """One after the other, empty ones included."""
    assert ragged(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert ragged(np.array([], np.int64), np.array([], np.int64)).tolist() == []
