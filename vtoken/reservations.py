"""Stages 2 and 3 of reclamation (paper §3.3): which requests are worth packing, out of which
blocks, and destinations taken for what pays. Tables and block lists do not change here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from vtoken.cache_room import Growth, Room, all_free, sparing_the_cache
from vtoken.config import VTokenConfig
from vtoken.occupancy import GIVEN_BACK, BlockOccupancy, RequestBlocks
from vtoken.planner import BlockSnapshot, Rejection, SourceChoice, build_moves, choose_sources
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.shared_planner import Holding, SharedChoice, choose_shared, group_by_holders
from vtoken.stats import VTokenStats
from vtoken.types import BoolArray

logger = logging.getLogger(__name__)

MAX_PLANS_PER_STEP = 32
"""When F passes θ_F, hundreds of requests have something to gain at once. Planning for all of
them would stall one step; this many already free blocks faster than decoding takes them."""


class Reservations:
    """Makes plans, and gives back the destinations of those that will not be.

    Attributes:
        config: in force; whoever changes it sets it.
        growth: asked for the blocks that requests may still come to ask for.
    """

    def __init__(
        self,
        config: VTokenConfig,
        pool: BlockPoolPort,
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        self.config = config
        self.growth: Callable[[], Growth] = lambda: Growth(0, 0)
        self._pool = pool
        self._occupancy = occupancy
        self._stats = stats
        self._is_short = False

    def note_shortage(self) -> None:
        """An allocation failed: until the next look, free blocks are worth more than what is
        cached in them."""
        self._is_short = True

    def for_step(self, requests: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Plans that pay, most wasteful request first; see :meth:`ReclamationManager.plan_step`.

        Each is its request's ``plan`` from here on.
        """
        plans = self._for_step(by_waste(requests))
        self._is_short = False
        return plans

    def at_once(
        self, kv: RequestKV, num_computed: int, max_sources: int
    ) -> RelocationPlan | Rejection:
        """A plan for one request, whatever is cached in the blocks that it takes."""
        if kv.plan is not None:
            return Rejection("in_flight")
        choice = self._choose(kv, num_computed, max_sources, self._pool.num_free_blocks())
        return choice if isinstance(choice, Rejection) else self._reserve(kv, choice, num_computed)

    def give_back(self, plan: RelocationPlan, outcome: str) -> None:
        """Free the destinations of a plan that does not stand, and count why."""
        self._pool.free(plan.dst_blocks[::-1].tolist())
        self._stats.inc("relocations_total", 1, outcome)

    def _for_step(self, candidates: list[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        if not candidates:
            return []
        room = self._room()
        plans = self._reserve_shared(candidates, room) if self.config.relocate_shared else []
        done = {plan.req_id for plan in plans}
        for kv, num_computed in candidates:
            if len(plans) >= MAX_PLANS_PER_STEP:
                break  # the others are still wasteful in the next step
            if kv.req_id in done:
                continue
            if kv.plan is not None:
                self._stats.inc("reclaim_skipped_total", 1, "in_flight")
                continue
            choice = self._choose_within(room, kv, num_computed)
            plan = (
                choice if isinstance(choice, Rejection) else self._reserve(kv, choice, num_computed)
            )
            if isinstance(plan, Rejection):
                self._stats.inc("reclaim_skipped_total", 1, plan.reason)
                continue
            plans.append(plan)
        return plans

    def _room(self) -> Room:
        """Destinations for the plans of this look."""
        config, pool = self.config, self._pool
        if self._is_short or config.relocate_into_cached or not pool.caches_prefixes:
            return all_free(pool)
        growth = self.growth()
        if growth.soon > pool.num_free_blocks():
            return all_free(pool)
        most = MAX_PLANS_PER_STEP * config.max_source_blocks
        return sparing_the_cache(pool, growth.in_all, most)

    def _choose_within(
        self, room: Room, kv: RequestKV, num_computed: int
    ) -> SourceChoice | Rejection:
        """A choice that the room allows, out of any blocks or out of those without cached
        content; takes its destinations from the room."""
        max_sources = self.config.max_source_blocks
        choice = self._choose(kv, num_computed, max_sources, room.spare)
        if isinstance(choice, SourceChoice):
            room.take(choice.num_destinations, from_spare=True)
        elif choice.reason == "no_headroom" and room.is_limited:
            choice = self._choose(kv, num_computed, max_sources, room.empty, cached_too=False)
            if isinstance(choice, Rejection):
                is_held_back = self._pool.num_free_blocks() > room.spare
                return Rejection("spares_cache" if is_held_back else "no_headroom")
            room.take(choice.num_destinations, from_spare=False)
        return choice

    def _reserve_shared(
        self, candidates: list[tuple[RequestKV, int]], room: Room
    ) -> list[RelocationPlan]:
        """Copy-on-write: a plan for every holder of shared blocks that all can let go together.

        The blocks themselves are only read; each holder's reference goes when its plan commits.
        Their content stays in the prefix cache until the pool needs the room.
        """
        free = [(kv, done) for kv, done in candidates if kv.plan is None and kv.num_evicted]
        groups = group_by_holders([self._shared_holding(kv, done) for kv, done in free])
        plans: list[RelocationPlan] = []
        for group in groups:
            if any(free[h][0].plan is not None for h in group.holders):
                continue
            if len(plans) + len(group.holders) > MAX_PLANS_PER_STEP:
                continue
            choice = choose_shared(
                group,
                self._occupancy.block_size,
                self.config.max_source_blocks,
                room.spare,
            )
            if isinstance(choice, SharedChoice):
                room.take(choice.num_destinations, from_spare=True)
                holders = [free[h] for h in choice.holders]
                plans += self._reserve_group(holders, choice.choices)
        return plans

    def _reserve_group(
        self, holders: list[tuple[RequestKV, int]], choices: tuple[SourceChoice, ...]
    ) -> list[RelocationPlan]:
        """A plan for every holder, or none at all."""
        plans: list[RelocationPlan] = []
        for (kv, num_computed), choice in zip(holders, choices, strict=True):
            plan = self._reserve(kv, choice, num_computed)
            if isinstance(plan, Rejection):
                for (holder, _), reserved in zip(holders, plans, strict=False):
                    holder.plan = None
                    self.give_back(reserved, "failed")
                return []
            plans.append(plan)
        self._stats.inc("shared_relocations_total")
        return plans

    def _shared_holding(self, kv: RequestKV, num_computed: int) -> Holding:
        """Shared blocks with room for gain, in chunks of B from the front.

        Prefixes are shared, so the search ends with the first chunk without a shared block.
        """
        size, ids, num_live = self._occupancy.block_size, kv.blocks.ids, kv.blocks.num_live
        end = num_computed // size
        places = ((ids[:end] != GIVEN_BACK) & (num_live[:end] < size)).nonzero()[0]
        step = self.config.max_source_blocks
        found = [np.empty(0, np.int64)]
        for start in range(0, len(places), step):
            chunk = places[start : start + step]
            shared = chunk[self._pool.shared(ids[chunk])]
            if not len(shared):
                break
            found.append(shared)
        where = np.concatenate(found)
        held = ids[where]
        return Holding(where, held, num_live[where], self._pool.references(held))

    def _choose(
        self,
        kv: RequestKV,
        num_computed: int,
        max_sources: int,
        max_destinations: int,
        *,
        cached_too: bool = True,
    ) -> SourceChoice | Rejection:
        num_closed = num_computed // kv.block_size
        eligible = self._eligible(kv.blocks, num_closed, max_sources, cached_too)
        snapshot = BlockSnapshot(kv.blocks.num_live, eligible, kv.block_size)
        return choose_sources(snapshot, max_sources, max_destinations)

    def _eligible(
        self, blocks: RequestBlocks, num_closed: int, max_sources: int, cached_too: bool
    ) -> BoolArray:
        """Blocks that may move: held, closed, private, maybe not cached; ``[num_blocks]``.

        A plan takes the emptiest of them, so only these are looked for, the emptiest first: the
        pool is asked about some ``max_sources`` blocks instead of all. Moving a full block gains
        nothing.
        """
        ids, num_live, size = blocks.ids, blocks.num_live, self._occupancy.block_size
        open_places = (ids[:num_closed] != GIVEN_BACK) & (num_live[:num_closed] < size)
        places = open_places.nonzero()[0]
        if not cached_too:
            places = places[~self._pool.cached(ids[places])]
        places = places[np.argsort(num_live[places], kind="stable")]
        eligible = np.zeros(len(ids), np.bool_)
        left = max_sources
        while left and len(places):
            some, places = places[:left], places[left:]
            private = some[~self._pool.shared(ids[some])]
            eligible[private] = True
            left -= len(private)
        return eligible

    def _reserve(
        self, kv: RequestKV, choice: SourceChoice, num_computed: int
    ) -> RelocationPlan | Rejection:
        try:
            dst_blocks = self._pool.allocate(choice.num_destinations)
        except Exception:
            # Nothing has changed yet, and tokens that stay where they are cost only room.
            logger.exception("no destinations for a relocation of request %s", kv.req_id)
            return Rejection("no_headroom")
        sources = kv.blocks.ids[choice.indices]
        live_ids = kv.table.live_ids_in(sources)
        moves = build_moves(
            live_ids, kv.table.slots_of(live_ids), sources, dst_blocks, kv.table.block_size
        )
        kv.plan = RelocationPlan(kv.req_id, choice.indices, dst_blocks, moves, num_computed)
        return kv.plan


def by_waste(requests: Iterable[tuple[RequestKV, int]]) -> list[tuple[RequestKV, int]]:
    """Requests that hold more blocks than their live tokens need, most wasteful first."""
    candidates = list(requests)
    if not candidates:
        return []
    store = candidates[0][0].store
    rows = np.fromiter((kv.row for kv, _ in candidates), np.int64, len(candidates))
    waste = store.num_retained[rows] + -store.num_live[rows] // store.block_size
    order = np.argsort(-waste, kind="stable")
    return [candidates[i] for i in order[: np.count_nonzero(waste > 0)].tolist()]
