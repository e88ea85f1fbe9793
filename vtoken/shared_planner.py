"""Planning for blocks that several requests share through the prefix cache: pure functions.

Copying live tokens out of a shared block frees it only when *all* its holders let go: one
holder's copy alone costs destinations and gains nothing. So the gain is reckoned for a group,
the requests that hold the same blocks, over one batch::

    gain = blocks that lose their last reference − Σ over holders ⌈live tokens they copy / S⌉

A block counts as freed only if everybody who references it is in the group. Each holder keeps its
own live tokens, so with *r* holders that keep a share *k* each at random, the gain is positive
only if r · k < 1. Holders that ended have dropped their references already and cost nothing.

It is an expectation: between planning and commit another request may find the block in the
prefix cache and hold it for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.planner import Rejection, SourceChoice


@dataclass(frozen=True, eq=False)
class Holding:
    """Shared, closed blocks that one request could let go.

    Attributes:
        places: ``[n]`` indices into its block list, ascending.
        block_ids: ``[n]`` the blocks there.
        num_live: ``[n]`` its own live tokens in each.
        references: ``[n]`` references that each block has, this request's included.
    """

    places: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    num_live: NDArray[np.int32]
    references: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SharedGroup:
    """Blocks that are held by the same requests and by nobody else.

    Attributes:
        holders: ``[h]`` which holdings, ascending.
        places: ``[h, n]`` where each holder has them.
        num_live: ``[h, n]`` live tokens of each holder in each block.
    """

    holders: tuple[int, ...]
    places: NDArray[np.int64]
    num_live: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SharedChoice:
    """What every holder of a group copies out in the same batch; gain is at least 1."""

    holders: tuple[int, ...]
    choices: tuple[SourceChoice, ...]
    num_freed: int

    @property
    def num_destinations(self) -> int:
        """Blocks that the copies of all holders fill."""
        return sum(choice.num_destinations for choice in self.choices)


def group_by_holders(holdings: Sequence[Holding]) -> list[SharedGroup]:
    """Blocks by who holds them; those with a holder outside ``holdings`` are left out."""
    holders_of: dict[int, list[tuple[int, int]]] = {}
    references: dict[int, int] = {}
    for h, holding in enumerate(holdings):
        references.update(zip(holding.block_ids.tolist(), holding.references.tolist(), strict=True))
        for i, block in enumerate(holding.block_ids.tolist()):
            holders_of.setdefault(block, []).append((h, i))
    members: dict[tuple[int, ...], list[list[int]]] = {}
    for block, found in holders_of.items():
        if len(found) == references[block]:
            holders = tuple(h for h, _ in found)
            members.setdefault(holders, []).append([i for _, i in found])
    return [_group(holdings, holders, indices) for holders, indices in members.items()]


def _group(
    holdings: Sequence[Holding], holders: tuple[int, ...], indices: list[list[int]]
) -> SharedGroup:
    columns = np.array(indices).T
    places = [holdings[h].places[column] for h, column in zip(holders, columns, strict=True)]
    live = [holdings[h].num_live[column] for h, column in zip(holders, columns, strict=True)]
    return SharedGroup(holders, np.array(places), np.array(live))


def choose_shared(
    group: SharedGroup, block_size: int, max_sources: int, max_destinations: int
) -> SharedChoice | Rejection:
    """Pick the blocks of a group whose joint release frees the most; see the module.

    Candidates are taken by rising live tokens summed over holders, at most ``max_sources`` (B);
    of the prefixes of that order the one with the largest gain wins, of equals the shortest.

    Args:
        group: not written.
        block_size: slots per block (S).
        max_sources: most blocks that each holder gives up.
        max_destinations: most destination blocks of all holders together.

    Returns:
        A choice with gain >= 1, else ``no_gain`` or ``no_headroom`` as for private blocks.
    """
    order = np.argsort(group.num_live.sum(0), kind="stable")[:max_sources]
    needed_each = -(-np.cumsum(group.num_live[:, order], axis=1) // block_size)
    needed = needed_each.sum(0)
    gain = np.arange(1, len(order) + 1) - needed
    if not len(order) or gain.max() < 1:
        return Rejection("no_gain")
    gain[needed > max_destinations] = 0
    best = int(np.argmax(gain))
    if gain[best] < 1:
        return Rejection("no_headroom")
    chosen = order[: best + 1]
    choices = (
        SourceChoice(np.sort(places[chosen]), int(each[best]))
        for places, each in zip(group.places, needed_each, strict=True)
    )
    return SharedChoice(group.holders, tuple(choices), int(gain[best]))
