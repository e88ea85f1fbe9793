"""TokenTable: three mutations, each all or nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core_models import empty_table, evict_tokens, make_table
from vtoken.errors import PlanError, TokenTableError
from vtoken.token_table import TokenTable


def state(table: TokenTable) -> tuple[list[int], list[int], int, int]:
    """All that can be read off a table."""
    ids = np.arange(table.num_tokens)
    return (
        table.live_ids().tolist(),
        table.slots_of(ids).tolist(),
        table.num_tokens,
        table.num_live,
    )


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_new_table_is_empty() -> None:
    """Nothing is live before the first sync."""
    assert state(empty_table(4)) == ([], [], 0, 0)


def test_sync_puts_tokens_where_their_block_is() -> None:
    """Slot = block * S + offset in list order, for prefill and for single decode steps."""
    table = make_table(6, [5, 2])
    assert table.live_slots().tolist() == [20, 21, 22, 23, 8, 9]
    table.sync_new_tokens(i32(2), 7)
    table.sync_new_tokens(i32(2), 8)
    table.sync_new_tokens(i32(9), 9)
    assert table.live_slots().tolist()[6:] == [10, 11, 36]
    assert (table.num_tokens, table.num_live) == (9, 9)


def test_sync_to_the_same_length_changes_nothing() -> None:
    """A step without new tokens needs no block."""
    table = make_table(6, [5, 2])
    before = state(table)
    table.sync_new_tokens(i32(), 6)
    assert state(table) == before


@pytest.mark.parametrize(("blocks", "total"), [([2], 5), ([2], 11), ([], 7), ([2, 3], 13)])
def test_sync_refuses_to_shrink_or_to_run_out_of_blocks(blocks: list[int], total: int) -> None:
    """TokenTableError with the numbers, and an unchanged table."""
    table = make_table(6, [5, 2])
    before = state(table)
    with pytest.raises(TokenTableError, match=f"from 6 to {total} .* got {len(blocks)}"):
        table.sync_new_tokens(np.array(blocks, np.int32), total)
    assert state(table) == before


@given(st.integers(1, 17), st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_sync_in_any_chunks_equals_sync_at_once(size: int, chunks: list[int]) -> None:
    """Chunked prefill, decode and growth beyond the capacity give the same table."""
    total = sum(chunks)
    blocks = np.random.default_rng(0).permutation(total // size + 2).astype(np.int32)
    table, done = empty_table(size), 0
    for chunk in chunks:
        table.sync_new_tokens(blocks[done // size :], done + chunk)
        done += chunk
    expected = [int(blocks[t // size]) * size + t % size for t in range(total)]
    assert state(table) == (list(range(total)), expected, total, total)


def test_growth_keeps_liveness_and_slots() -> None:
    """Arrays that are replaced by larger ones keep every bit."""
    table = make_table(200, range(1, 60))
    evict_tokens(table, ids(*range(0, 200, 3)))
    live, slots = table.live_ids().tolist(), table.live_slots().tolist()
    table.sync_new_tokens(np.arange(100, 400, dtype=np.int32), 1000)
    assert table.live_ids().tolist()[: len(live)] == live
    assert table.live_slots().tolist()[: len(slots)] == slots


def test_evict_marks_dead_and_names_slots() -> None:
    """Victims leave the live list, keep their slot, and it comes back in order."""
    table = make_table(6, [5, 2])
    assert evict_tokens(table, ids(1, 4, 5)) == [21, 8, 9]
    assert table.live_ids().tolist() == [0, 2, 3]
    assert table.live_slots().tolist() == [20, 22, 23]
    assert table.slots_of(ids(1, 4)).tolist() == [21, 8]
    assert table.blocks_of(ids(0, 5)).tolist() == [5, 2]
    assert table.is_live(ids(0, 1)).tolist() == [True, False]
    assert (table.num_live, table.num_tokens) == (3, 6)


def test_evict_nothing_changes_nothing() -> None:
    """An empty list of victims is fine."""
    table = make_table(6, [5, 2])
    assert evict_tokens(table, ids()) == []
    assert table.num_live == 6


@pytest.mark.parametrize(
    ("victims", "message"),
    [
        ([6], "token 6 is outside 0 … 5"),
        ([-1, 2], "token -1 is outside"),
        ([2, 3], "token 2 is already dead"),
        ([4, 4], "2 ids to evict, only 1 distinct"),
    ],
)
def test_evict_refuses_unknown_dead_and_repeated(victims: list[int], message: str) -> None:
    """TokenTableError with the offender, and an unchanged table."""
    table = make_table(6, [5, 2])
    evict_tokens(table, ids(2))
    before = state(table)
    with pytest.raises(TokenTableError, match=message):
        evict_tokens(table, np.array(victims))
    assert state(table) == before


def test_live_ids_can_be_cut() -> None:
    """``before`` bounds the answer and may lie beyond the end."""
    table = make_table(6, [5, 2])
    evict_tokens(table, ids(0))
    assert table.live_ids(before=3).tolist() == [1, 2]
    assert table.live_ids(before=0).tolist() == []
    assert table.live_ids(before=99).tolist() == [1, 2, 3, 4, 5]


def test_moves_change_slots_and_nothing_else() -> None:
    """Tokens point at their copies in logical order; the rest stays."""
    table = make_table(8, [5, 2])
    evict_tokens(table, ids(1, 2))
    table.apply_moves(ids(0, 3, 5), i32(20, 23, 9), i32(36, 37, 38))
    assert table.live_ids().tolist() == [0, 3, 4, 5, 6, 7]
    assert table.live_slots().tolist() == [36, 37, 8, 38, 10, 11]
    assert (table.num_live, table.num_tokens) == (6, 8)


def test_moves_may_be_empty() -> None:
    """A plan whose tokens all died in flight commits without a move."""
    table = make_table(8, [5, 2])
    before = state(table)
    table.apply_moves(ids(), i32(), i32())
    assert state(table) == before


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (([0], [20], [36, 37]), "1 tokens, 1 sources, 2 destinations"),
        (([0, 3], [20], [36, 37]), "2 tokens, 1 sources, 2 destinations"),
        (([0, 1], [20, 21], [36, 37]), "token 1 is already dead"),
        (([0, 8], [20, 12], [36, 37]), "outside 0 … 7"),
        (([0, 3], [20, 22], [36, 37]), "token 3 is at slot 23, plan says 22"),
        (([0, 3], [20, 23], [36, 36]), "2 moves to 1 distinct slots"),
        (([0, 0], [20, 20], [36, 37]), "2 moves of 1 distinct tokens"),
        (([0, 3], [20, 23], [36, 8]), "destination slot 8 is held"),
    ],
)
def test_moves_are_all_or_nothing(moves: tuple[list[int], ...], message: str) -> None:
    """PlanError with the offender, and an unchanged table."""
    table = make_table(8, [5, 2])
    evict_tokens(table, ids(1, 2))
    before = state(table)
    token_ids, src, dst = moves
    with pytest.raises(PlanError, match=message):
        table.apply_moves(np.array(token_ids), i32(*src), i32(*dst))
    assert state(table) == before


def test_memory_per_token_is_as_documented() -> None:
    """4 + 1 bytes a token: 80 KiB at 16 K tokens."""
    table = make_table(16 * 1024, range(1, 1025), 16)
    region = table._store._parts(int(table._store.first_block[table._row]), 1024)
    *blocks, groups, slots, live = (part.nbytes for part in region)
    assert (slots + live, groups, sum(blocks)) == (80 * 1024, 1024, 8 * 1024)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.live_ids(),
        lambda t: t.live_slots(),
        lambda t: t.slots_of(np.arange(4)),
        lambda t: t.blocks_of(np.arange(4)),
        lambda t: t.is_live(np.arange(4)),
        lambda t: np.array(evict_tokens(t, np.arange(1))),
    ],
)
def test_answers_are_copies(read: Callable[[TokenTable], np.ndarray]) -> None:
    """Writing into an answer does not reach the table."""
    table = make_table(6, [5, 2])
    answer = read(table)
    before = state(table)
    answer[:] = 1
    assert state(table) == before
