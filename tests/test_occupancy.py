"""BlockOccupancy: incremental totals against counting."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.errors import TokenTableError
from vtoken.occupancy import GIVEN_BACK, BlockOccupancy, RequestBlocks


def make_blocks(
    occupancy: BlockOccupancy, block_ids: list[int], num_tokens: int = 0
) -> RequestBlocks:
    """A request that holds these blocks, filled with ``num_tokens`` tokens."""
    blocks = occupancy.new_request()
    blocks.extend(np.array(block_ids, np.int32))
    if num_tokens:
        blocks.add_tokens(0, num_tokens)
    return blocks


def remove(blocks: RequestBlocks, block_ids: list[int]) -> list[int]:
    """One live token less for each entry; the places that are left empty."""
    rows, counts = np.array([blocks.row]), np.array([len(block_ids)])
    ids = np.array(block_ids, np.int32)
    whose, places = blocks._pool.remove_tokens(rows, counts, ids)
    assert not whose.any()
    return places.tolist()


def totals(occupancy: BlockOccupancy) -> tuple[int, int, list[int]]:
    return (
        occupancy.live_tokens,
        occupancy.retained_blocks,
        occupancy.blocks_by_live_tokens().tolist(),
    )


def at(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_empty_pool_wastes_nothing() -> None:
    """F and the low share are 0 without a held block, not a division by zero."""
    occupancy = BlockOccupancy(9, 4)
    assert (occupancy.waste_ratio, occupancy.low_utilization_block_ratio) == (0.0, 0.0)


def test_waste_ratio_is_equation_one() -> None:
    """F = 1 − Σ n_b / (N·S), over all requests."""
    occupancy = BlockOccupancy(9, 4)
    make_blocks(occupancy, [1, 2, 3], 9)
    make_blocks(occupancy, [4], 1)
    assert occupancy.waste_ratio == pytest.approx(1 - 10 / 16)
    assert totals(occupancy) == (10, 4, [0, 2, 0, 0, 2])


@pytest.mark.parametrize(("size", "num_tokens", "low"), [(4, 6, 1), (4, 7, 0), (5, 7, 1)])
def test_half_full_counts_as_low(size: int, num_tokens: int, low: int) -> None:
    """u_b <= 1/2 includes exactly half; with odd S it means at most ⌊S/2⌋."""
    occupancy = BlockOccupancy(9, size)
    make_blocks(occupancy, [1, 2], num_tokens)
    assert occupancy.low_utilization_block_ratio == low / 2


@pytest.mark.parametrize(
    ("size", "expected"),
    [(16, [3, 2, 2, 2, 2, 2, 2, 2]), (4, [1, 1, 0, 1, 0, 1, 0, 1]), (5, [1, 1, 0, 1, 1, 0, 1, 1])],
)
def test_ranges_of_utilization_have_every_block_once(size: int, expected: list[int]) -> None:
    """Half full belongs to the range that ends at 1/2; an empty block to the first range."""
    occupancy = BlockOccupancy(32, size)
    for num_live in range(size + 1):
        make_blocks(occupancy, [num_live + 1], num_live)
    assert occupancy.blocks_by_utilization(8).tolist() == expected


def test_adding_one_by_one_equals_adding_at_once() -> None:
    """Decode's short path and prefill's vector path count alike."""
    one, many = BlockOccupancy(9, 4), BlockOccupancy(9, 4)
    blocks, _ = make_blocks(one, [1, 2, 3]), make_blocks(many, [1, 2, 3], 10)
    for token in range(10):
        blocks.add_tokens(token, token + 1)
    assert totals(one) == totals(many) == (10, 3, [0, 0, 1, 0, 2])


def test_extend_beyond_capacity_keeps_counts() -> None:
    """The mirror grows as vLLM's list does, in small and in huge steps."""
    occupancy = BlockOccupancy(500, 4)
    blocks = make_blocks(occupancy, list(range(1, 31)), 120)
    blocks.extend(np.arange(31, 36, dtype=np.int32))
    blocks.extend(np.arange(36, 436, dtype=np.int32))
    blocks.add_tokens(120, 435 * 4)
    assert blocks.ids.tolist() == list(range(1, 436))
    assert blocks.num_live.tolist() == [4] * 435
    assert totals(occupancy) == (1740, 435, [0, 0, 0, 0, 435])


def test_remove_counts_repeated_blocks() -> None:
    """One entry per victim, in any order."""
    occupancy = BlockOccupancy(9, 4)
    blocks = make_blocks(occupancy, [7, 3, 5], 12)
    remove(blocks, [5, 7, 5, 5])
    assert blocks.num_live.tolist() == [3, 4, 1]
    assert totals(occupancy) == (8, 3, [0, 1, 0, 1, 1])


def test_shared_block_counts_once_per_holder() -> None:
    """Two holders of a prefix block have their own n_b for it."""
    occupancy = BlockOccupancy(9, 4)
    first, second = make_blocks(occupancy, [1, 2], 8), make_blocks(occupancy, [1, 3], 8)
    remove(first, [1, 1])
    assert (first.num_live.tolist(), second.num_live.tolist()) == ([2, 4], [4, 4])
    assert totals(occupancy) == (14, 4, [0, 0, 1, 0, 3])


def test_given_back_places_keep_positions() -> None:
    """The list keeps its length, the place its index, and F forgets the block."""
    occupancy = BlockOccupancy(9, 4)
    blocks = make_blocks(occupancy, [1, 2, 3], 12)
    assert remove(blocks, [2] * 3) == []
    assert remove(blocks, [2]) == [1]
    assert blocks.give_back(at(1)).tolist() == [2]
    assert blocks.ids.tolist() == [1, GIVEN_BACK, 3]
    assert (blocks.length, blocks.retained) == (3, 2)
    assert totals(occupancy) == (8, 2, [0, 0, 0, 0, 2])
    assert occupancy.waste_ratio == 0


@pytest.mark.parametrize("place", [0, 1])
def test_give_back_refuses_live_and_empty_places(place: int) -> None:
    """A block with live tokens, or none at all, cannot go back; nothing changes."""
    occupancy = BlockOccupancy(9, 4)
    blocks = make_blocks(occupancy, [1, 2], 8)
    remove(blocks, [2] * 4)
    blocks.give_back(at(1))
    before = totals(occupancy)
    with pytest.raises(TokenTableError, match=rf"places \[{place}\] .* cannot give them back"):
        blocks.give_back(at(place))
    assert totals(occupancy) == before


def test_relocate_puts_destinations_into_first_sources() -> None:
    """Destinations take the first places, later sources are given back."""
    occupancy = BlockOccupancy(12, 4)
    blocks = make_blocks(occupancy, [1, 2, 3, 4, 5], 20)
    remove(blocks, [1, 1, 1, 3, 3, 4, 4, 4])  # n = 1, 4, 2, 1, 4
    blocks.relocate(at(0, 2, 3), np.array([9], np.int32), np.array([4], np.int32))
    assert blocks.ids.tolist() == [9, 2, 0, 0, 5]
    assert blocks.num_live.tolist() == [4, 4, 0, 0, 4]
    assert totals(occupancy) == (12, 3, [0, 0, 0, 0, 3])
    remove(blocks, [9])
    assert blocks.num_live.tolist() == [3, 4, 0, 0, 4]


def test_clear_takes_the_request_out() -> None:
    """Only the other request remains in the totals."""
    occupancy = BlockOccupancy(9, 4)
    gone, stays = make_blocks(occupancy, [1, 2, 3], 11), make_blocks(occupancy, [1, 4], 6)
    remove(gone, [2] * 4)
    gone.give_back(at(1))
    gone.clear()
    assert (gone.length, gone.retained) == (0, 0)
    assert totals(occupancy) == (6, 2, [0, 0, 1, 0, 1])
    assert stays.num_live.tolist() == [4, 2]
    gone.clear()  # nothing left, nothing happens
    assert totals(occupancy) == (6, 2, [0, 0, 1, 0, 1])


def test_histogram_is_a_copy() -> None:
    """Readers cannot write the totals."""
    occupancy = BlockOccupancy(9, 4)
    occupancy.blocks_by_live_tokens()[:] = 7
    assert totals(occupancy) == (0, 0, [0, 0, 0, 0, 0])
