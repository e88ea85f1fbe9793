"""How many destinations relocation may take without costing the prefix cache anything.

vLLM counts a block that nobody references as free, also if a prefix can still be found in it, and
hands out the blocks without cached content first. A relocated token needs room of its own, but
its source, once freed, is such a cached block again: the copy and the cached original both stay.
So a plan out of cached blocks makes the pool fuller than it was, and what it takes is missing
later, when stock vLLM would still have had an empty block and ours drops a cached one.

Hence, while no request lacks blocks, two allowances::

    free list   | empty ............................ | cached ........ |
                | spare ......... | growth ......... |

    plan out of blocks without cached content    takes ``empty``, and gives back more than that
    plan out of cached blocks                    takes ``spare`` only: what running requests
                                                 cannot come to ask for

When an allocation failed, or the free blocks would not do for the next block of every request,
blocks are worth more than old prefixes, and every free one may be taken. So in a pool that the load
fits into, relocation never makes vLLM drop a cached block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vtoken.ports import BlockPoolPort


class Growth(NamedTuple):
    """Blocks that running requests may still ask for: within the next steps, and in all."""

    soon: int
    in_all: int


@dataclass
class Room:
    """Free blocks that the plans of one look may still take; see the module.

    Attributes:
        empty: for plans out of blocks without cached content.
        spare: for all other plans; never more than ``empty``.
        is_limited: whether there are more free blocks, with cached content.
    """

    empty: int
    spare: int
    is_limited: bool

    def take(self, num_blocks: int, *, from_spare: bool) -> None:
        """Destinations of a plan are reserved."""
        self.empty -= num_blocks
        self.spare = min(self.spare - num_blocks * from_spare, self.empty)


def all_free(pool: BlockPoolPort) -> Room:
    """Room without regard to the prefix cache."""
    free = pool.num_free_blocks()
    return Room(free, free, is_limited=False)


def sparing_the_cache(pool: BlockPoolPort, growth: int, most: int) -> Room:
    """Room that costs no cached block.

    Args:
        pool: not written.
        growth: blocks that running requests may still ask for.
        most: destinations that the plans of this look can use; nothing is counted beyond.
    """
    free = pool.num_free_blocks()
    reserve = growth if growth < free else 0
    empty = pool.num_empty_blocks(reserve + most)
    spare = max(0, empty - growth)
    return Room(empty, spare, is_limited=True)
