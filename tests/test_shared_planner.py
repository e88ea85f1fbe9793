"""The expected-gain rule for shared blocks, against brute force over all sets of blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.planner import Rejection
from vtoken.shared_planner import (
    Holding,
    SharedChoice,
    SharedGroup,
    choose_shared,
    group_by_holders,
)


def make_group(num_live: list[list[int]]) -> SharedGroup:
    """Holders × blocks; holder ``h`` has block ``i`` at place ``10 · h + i``."""
    live = np.array(num_live, np.int32)
    places = 10 * np.arange(len(live))[:, None] + np.arange(live.shape[1])
    return SharedGroup(tuple(range(len(live))), places.astype(np.int64), live)


def make_holding(blocks: list[int], references: list[int]) -> Holding:
    """One live token in each block, at the place of the same number."""
    n = len(blocks)
    return Holding(
        np.array(blocks, np.int64),
        np.array(blocks, np.int32),
        np.ones(n, np.int32),
        np.array(references, np.int64),
    )


def best_gain(group: SharedGroup, size: int, max_sources: int, max_destinations: int) -> int:
    """Most blocks that the joint release of any set frees."""
    best = 0
    for k in range(1, min(max_sources, group.num_live.shape[1]) + 1):
        for chosen in itertools.combinations(range(group.num_live.shape[1]), k):
            live = group.num_live[:, list(chosen)].sum(1)
            needed = sum(-(-int(n) // size) for n in live)
            if needed <= max_destinations:
                best = max(best, k - needed)
    return best


@st.composite
def groups(draw: st.DrawFn) -> tuple[SharedGroup, int]:
    """Up to three holders of up to six blocks, with the block size."""
    size = draw(st.integers(2, 8))
    num_holders, num_blocks = draw(st.integers(2, 3)), draw(st.integers(1, 6))
    row = st.lists(st.integers(1, size), min_size=num_blocks, max_size=num_blocks)
    return make_group(draw(st.lists(row, min_size=num_holders, max_size=num_holders))), size


@settings(max_examples=200)
@given(groups(), st.integers(1, 8), st.integers(0, 6))
def test_gain_is_what_the_group_frees_minus_what_all_copies_fill(
    drawn: tuple[SharedGroup, int], max_sources: int, max_destinations: int
) -> None:
    """Every holder copies its own live tokens, the blocks are freed once; no plan loses blocks."""
    group, size = drawn
    choice = choose_shared(group, size, max_sources, max_destinations)
    if isinstance(choice, Rejection):
        unlimited = choose_shared(group, size, max_sources, 100)
        assert choice.reason == ("no_gain" if isinstance(unlimited, Rejection) else "no_headroom")
        return
    for h, sources in enumerate(choice.choices):
        local = sources.indices - 10 * h
        assert sources.num_destinations == -(-int(group.num_live[h, local].sum()) // size)
        assert sources.num_freed >= 1  # each plan on its own looks like any other (I4)
        assert (local == choice.choices[0].indices).all()
    num_sources = len(choice.choices[0].indices)
    assert num_sources <= max_sources
    assert choice.num_destinations <= max_destinations
    assert choice.num_freed == num_sources - choice.num_destinations >= 1
    assert choice.num_freed <= best_gain(group, size, max_sources, max_destinations)


@pytest.mark.parametrize(
    ("num_holders", "live", "freed"),
    [(1, 8, 4), (2, 8, 0), (2, 4, 4), (3, 4, 2), (4, 4, 0), (4, 2, 4), (8, 2, 0)],
)
def test_gain_needs_less_than_one_share_per_holder(num_holders: int, live: int, freed: int) -> None:
    """r holders that keep a share k each gain only if r · k < 1: here 8 blocks of 16 tokens."""
    choice = choose_shared(make_group([[live] * 8] * num_holders), 16, 32, 100)
    assert (choice.num_freed if isinstance(choice, SharedChoice) else 0) == freed


def test_short_headroom_is_said() -> None:
    """It would pay, but the holders together find no room for their copies."""
    assert choose_shared(make_group([[1] * 4] * 2), 4, 8, 1) == Rejection("no_headroom")


def test_groups_are_blocks_with_the_same_holders() -> None:
    """A block with a reference from outside is nobody's to free."""
    holdings = [
        make_holding([3, 5, 7, 8], [2, 2, 2, 2]),
        make_holding([3, 5, 7], [2, 2, 3]),
        make_holding([8, 9], [2, 2]),
    ]
    holdings[1].references[2] = holdings[0].references[2] = 3
    groups = {g.holders: g.places.tolist() for g in group_by_holders(holdings)}
    assert groups == {(0, 1): [[3, 5], [3, 5]], (0, 2): [[8], [8]]}


def test_nobody_holds_anything() -> None:
    """No holding, no group."""
    assert group_by_holders([]) == []
    assert group_by_holders([make_holding([], [])]) == []
