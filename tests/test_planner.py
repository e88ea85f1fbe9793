"""The planner's properties, against brute force over all allowed sets of sources."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core_models import evict_tokens, make_table
from vtoken.planner import BlockSnapshot, Rejection, SourceChoice, build_moves, choose_sources
from vtoken.stats import SKIP_REASONS


def make_snapshot(
    num_live: list[int], eligible: list[bool] | None = None, size: int = 4
) -> BlockSnapshot:
    """Block state with every block eligible unless said otherwise."""
    flags = [True] * len(num_live) if eligible is None else eligible
    return BlockSnapshot(np.array(num_live, np.int32), np.array(flags, bool), size)


@st.composite
def snapshots(draw: st.DrawFn, max_blocks: int = 8) -> BlockSnapshot:
    """Random occupancies with random eligibility."""
    size = draw(st.integers(1, 6))
    n = draw(st.integers(0, max_blocks))
    num_live = draw(st.lists(st.integers(0, size), min_size=n, max_size=n))
    return make_snapshot(num_live, draw(st.lists(st.booleans(), min_size=n, max_size=n)), size)


def best_gain(snapshot: BlockSnapshot, max_sources: int, max_destinations: int) -> int:
    """Most blocks that any allowed set of sources frees, by trying all of them."""
    allowed = np.flatnonzero(snapshot.eligible).tolist()
    best = 0
    for k in range(1, min(max_sources, len(allowed)) + 1):
        for chosen in itertools.combinations(allowed, k):
            needed = -(-int(snapshot.num_live[list(chosen)].sum()) // snapshot.block_size)
            if needed <= max_destinations:
                best = max(best, k - needed)
    return best


@settings(max_examples=200)
@given(snapshots(), st.integers(2, 8), st.integers(0, 4))
def test_choice_is_allowed_and_frees_as_much_as_possible(
    snapshot: BlockSnapshot, max_sources: int, max_destinations: int
) -> None:
    """Only eligible blocks, at most B, within the headroom, and no set of blocks frees more."""
    choice = choose_sources(snapshot, max_sources, max_destinations)
    expected = best_gain(snapshot, max_sources, max_destinations)
    if isinstance(choice, Rejection):
        assert expected == 0
        unlimited = best_gain(snapshot, max_sources, len(snapshot.num_live))
        assert choice.reason == ("no_headroom" if unlimited else "no_gain")
        return
    assert snapshot.eligible[choice.indices].all()
    assert 2 <= len(choice.indices) <= max_sources or not choice.num_destinations
    assert len(choice.indices) <= max_sources
    assert (np.diff(choice.indices) > 0).all()
    live = int(snapshot.num_live[choice.indices].sum())
    assert choice.num_destinations == -(-live // snapshot.block_size) <= max_destinations
    assert choice.num_freed == expected >= 1


@given(snapshots(max_blocks=30), st.integers(2, 12), st.integers(0, 6))
def test_choice_copies_no_more_than_needed(
    snapshot: BlockSnapshot, max_sources: int, max_destinations: int
) -> None:
    """Without its fullest block a choice frees less: nothing is copied for no gain."""
    choice = choose_sources(snapshot, max_sources, max_destinations)
    if isinstance(choice, Rejection):
        return
    counts = np.sort(snapshot.num_live[choice.indices])
    assert counts[-1] < snapshot.block_size, "a full block moves"
    fewer = len(counts) - 1 - -(-int(counts[:-1].sum()) // snapshot.block_size)
    assert fewer < choice.num_freed


@pytest.mark.parametrize(
    ("num_live", "eligible", "max_destinations", "reason"),
    [
        ([], None, 9, "no_gain"),
        ([4, 4, 4], None, 9, "no_gain"),
        ([3, 3], None, 9, "no_gain"),
        ([1, 1], [True, False], 9, "no_gain"),
        ([1, 1], None, 0, "no_headroom"),
        ([3, 3, 3, 3], None, 2, "no_headroom"),
    ],
)
def test_rejection_says_why(
    num_live: list[int], eligible: list[bool] | None, max_destinations: int, reason: str
) -> None:
    """``no_gain``: packing frees nothing; ``no_headroom``: it would, with more destinations."""
    choice = choose_sources(make_snapshot(num_live, eligible), 8, max_destinations)
    assert choice == Rejection(reason)
    assert reason in SKIP_REASONS


def test_emptiest_blocks_first_and_earlier_wins_ties() -> None:
    """Candidates are taken by rising u_b, and by index among equals."""
    choice = choose_sources(make_snapshot([4, 2, 1, 2, 2]), 2, 9)
    assert isinstance(choice, SourceChoice)
    assert choice.indices.tolist() == [1, 2]


def test_short_headroom_shrinks_the_choice() -> None:
    """With fewer destinations the set shrinks instead of being refused."""
    snapshot = make_snapshot([1] * 8)
    gains = []
    for max_destinations in (0, 1, 2):
        choice = choose_sources(snapshot, 8, max_destinations)
        gains.append(0 if isinstance(choice, Rejection) else choice.num_freed)
    assert gains == [0, 3, 6]


@given(st.data())
def test_moves_keep_logical_order_and_fill_without_gap(data: st.DataObject) -> None:
    """Exactly the live tokens of the sources move, by rising id, into consecutive slots."""
    size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    blocks = data.draw(st.permutations(range(1, num_blocks + 1)))
    table = make_table(num_blocks * size, blocks, size)
    dead = data.draw(st.sets(st.integers(0, num_blocks * size - 1)))
    evict_tokens(table, np.array(sorted(dead), np.int64))
    sources = data.draw(st.lists(st.sampled_from(blocks), unique=True))
    dst_blocks = np.array(data.draw(st.permutations(range(20, 28))), np.int32)[: len(sources)]

    moves = build_moves(
        table.live_ids(), table.live_slots(), np.array(sources, np.int32), dst_blocks, size
    )

    expected = [
        token
        for token in range(num_blocks * size)
        if token not in dead and blocks[token // size] in sources
    ]
    assert moves.token_ids.tolist() == expected
    assert moves.num_moves == len(expected)
    assert moves.src_slots.tolist() == table.slots_of(moves.token_ids).tolist()
    slots = [block * size + offset for block in dst_blocks.tolist() for offset in range(size)]
    assert moves.dst_slots.tolist() == slots[: len(expected)]
    assert moves.src_slots.dtype == moves.dst_slots.dtype == np.int32
    table.apply_moves(moves.token_ids, moves.src_slots, moves.dst_slots)


def test_deciding_leaves_the_snapshot_alone() -> None:
    """Pure: the arrays of the caller are not written."""
    snapshot = make_snapshot([1, 2, 3, 0])
    choose_sources(snapshot, 8, 8)
    assert snapshot.num_live.tolist() == [1, 2, 3, 0]
    assert snapshot.eligible.all()
