"""The reclamation backend (paper §3.3): turns holes into free blocks, in two phases.

    reserve    stages 1–3: F > θ_F near the watermark, headroom, plan; destinations are taken
    send       the batch rides to the worker; sources stay in place and are still read
    settle     the worker reports the copy: commit (table, block list, sources freed), or, if
               the copy failed or the request is gone, give the destinations back

Nothing that a forward may read changes before the copy is known to be complete (I3), and a
request has at most one plan in flight (I4).

The moment before vLLM would preempt is the exception: plans in flight are committed early, and
urgent plans as they are made. The worker finishes both before the next forward, the first thing
that may write to the blocks that they freed; only a failing copy then costs its request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.cache_room import Growth, Room, all_free, sparing_the_cache
from vtoken.config import VTokenConfig
from vtoken.errors import PlanError
from vtoken.occupancy import GIVEN_BACK, BlockOccupancy, RequestBlocks
from vtoken.planner import BlockSnapshot, Rejection, SourceChoice, build_moves, choose_sources
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.shared_planner import Holding, SharedChoice, choose_shared, group_by_holders
from vtoken.stats import VTokenStats
from vtoken.threshold import Bounds, Threshold, next_threshold
from vtoken.types import BoolArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """What a report led to.

    Attributes:
        committed: requests whose plan stands.
        lost: requests whose plan was committed before its copy failed: their K/V is gone and
            they must end with an error. Empty unless a copy fails under memory pressure.
    """

    committed: list[RequestKV]
    lost: list[RequestKV]


_REFUSED = Rejection("refused")

MAX_PLANS_PER_STEP = 32
"""When F passes θ_F, hundreds of requests have something to gain at once. Planning for all of
them would stall one step; this many already free blocks faster than decoding takes them."""


class ReclamationManager:
    """Plans relocations and carries them through; owns every plan in flight.

    Attributes:
        approves: asked for each plan that is committed as it is made, with the number of tokens
            whose K/V is complete: False takes the plan back.
        growth: asked for the blocks that requests may still come to ask for.
    """

    def __init__(
        self,
        config: VTokenConfig,
        pool: BlockPoolPort,
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        self._config = config
        self._threshold = Threshold(config.theta_f)
        self._pool = pool
        self._occupancy = occupancy
        self._stats = stats
        self._in_flight: dict[int, list[RelocationPlan]] = {}
        self._urgent: list[RelocationPlan] = []
        self._unproven: dict[int, list[RequestKV]] = {}
        self._next_ticket = 1
        self._steps_to_check = 0
        self._net_freed = 0
        self._is_short = False
        self.growth: Callable[[], Growth] = lambda: Growth(0, 0)
        self.approves: Callable[[RelocationPlan, int], bool] = lambda plan, num_computed: True

    def reconfigure(self, config: VTokenConfig) -> None:
        """Use other thresholds from the next step on; plans in flight are not affected."""
        if (config.theta_f, config.theta_f_mode) != (
            self._config.theta_f,
            self._config.theta_f_mode,
        ):
            self._threshold = Threshold(config.theta_f)
        self._config = config
        self._steps_to_check = 0

    def note_shortage(self) -> None:
        """An allocation failed: until the next look, free blocks are worth more than what is
        cached in them."""
        self._is_short = True

    @property
    def theta_f(self) -> float:
        """The threshold in force; see :mod:`vtoken.threshold`."""
        return self._threshold.theta_f

    @property
    def num_in_flight(self) -> int:
        """Plans sent and not yet settled, orphaned ones included."""
        return sum(len(plans) for plans in self._in_flight.values())

    @property
    def awaits_reports(self) -> bool:
        """Whether any copy has still to be made or reported, committed early or not."""
        return bool(self._urgent or self._unproven or self.num_in_flight)

    def blocks_in_flight(self) -> int:
        """Destination blocks held by plans in flight."""
        return sum(len(p.dst_blocks) for plans in self._in_flight.values() for p in plans)

    def destinations_in_flight(self) -> NDArray[np.int32]:
        """Ids of those blocks."""
        plans = [plan.dst_blocks for batch in self._in_flight.values() for plan in batch]
        return np.concatenate([np.empty(0, np.int32), *plans])

    # -- reserve ---------------------------------------------------------------------------

    def plan_step(self, requests: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Look for work once every ``check_interval_steps`` and reserve what pays.

        Args:
            requests: candidates, each with its number of tokens whose K/V is complete
                *before* this step; the block of the next token and later ones never move.

        Returns:
            Plans of one batch, all with the same new ticket; empty if there is nothing to do.
        """
        self._steps_to_check -= 1
        if self._steps_to_check > 0 or not self._config.relocates:
            return []
        self._steps_to_check = self._config.check_interval_steps
        self._adapt_threshold()
        reason = self._not_eligible()
        if reason is not None:
            self._stats.inc("reclaim_skipped_total", 1, reason)
            return []
        plans = self._reserve_plans(requests)
        self._is_short = False
        if plans:
            self._in_flight[self._stamp(plans)] = list(plans)
        return plans

    def _stamp(self, plans: list[RelocationPlan]) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        for plan in plans:
            plan.ticket = ticket
        return ticket

    def _adapt_threshold(self) -> None:
        config = self._config
        if config.theta_f_mode == "adaptive":
            self._threshold = next_threshold(
                self._threshold,
                Bounds(config.theta_f_min, config.theta_f_max),
                self._occupancy.waste_ratio,
                self._pool.num_free_blocks() / self._pool.num_total_blocks,
            )

    def _not_eligible(self) -> str | None:
        """Stage 1: the reason not to look at requests at all, or None."""
        if self._occupancy.waste_ratio <= self._threshold.theta_f:
            return "below_theta_f"
        watermark = self._config.low_watermark_ratio * self._pool.num_total_blocks
        if self._pool.num_free_blocks() > watermark:
            return "above_watermark"
        return None

    def _reserve_plans(self, requests: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Stages 2 and 3, most wasteful request first."""
        candidates = _by_waste(requests)
        if not candidates:
            return []
        room = self._room()
        plans = self._reserve_shared(candidates, room) if self._config.relocate_shared else []
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
        config, pool = self._config, self._pool
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
        max_sources = self._config.max_source_blocks
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
                self._config.max_source_blocks,
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
                    self._roll_back(reserved, "failed")
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
        step = self._config.max_source_blocks
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

    # -- urgent ----------------------------------------------------------------------------

    def reclaim_now(self, requests: Iterable[tuple[RequestKV, int]]) -> RelocationPlan | None:
        """Free at least one block at once, whatever F and the watermark say.

        Args:
            requests: candidates with their number of tokens whose K/V will be complete before
                the next forward.

        Returns:
            The plan, already committed, or None if no packing frees a block. The worker must
            copy it before the next forward: see :meth:`take_urgent`.
        """
        for kv, num_computed in _by_waste(requests):
            if not self._config.relocates:
                break  # the last plan was not approved of, and that stopped relocation
            plan = self._pack(kv, num_computed, self._config.max_source_blocks)
            if isinstance(plan, RelocationPlan):
                self._stats.inc("urgent_relocations_total")
                return plan
        return None

    def compact(self, kv: RequestKV, num_computed: int) -> None:
        """Pack one request at once, as tightly as its private closed blocks allow.

        Several plans, if free blocks are short: the sources of the first are room for the next,
        since the worker copies them in order. ``max_source_blocks`` does not count here.
        """
        all_places = kv.num_places
        while isinstance(plan := self._pack(kv, num_computed, all_places), RelocationPlan):
            pass
        if plan is not _REFUSED and plan.reason != "no_gain":
            self._stats.inc("reclaim_skipped_total", 1, plan.reason)

    def _pack(
        self, kv: RequestKV, num_computed: int, max_sources: int
    ) -> RelocationPlan | Rejection:
        """Commit a plan before its copy; the worker makes it before the next forward."""
        if kv.plan is not None:
            return Rejection("in_flight")
        choice = self._choose(kv, num_computed, max_sources, self._pool.num_free_blocks())
        if isinstance(choice, Rejection):
            return choice
        plan = self._reserve(kv, choice, num_computed)
        if isinstance(plan, Rejection):
            return plan
        self._stamp([plan])
        kv.plan = None
        if not self.approves(plan, num_computed):
            self._roll_back(plan, "failed")
            return _REFUSED
        self._commit(kv, plan)
        self._urgent.append(plan)
        self._unproven[plan.ticket] = [kv]
        return plan

    def take_urgent(self) -> list[RelocationPlan]:
        """Urgent plans since the last call, in the order in which they must be copied."""
        plans, self._urgent = self._urgent, []
        return plans

    def commit_early(self, requests: dict[str, RequestKV]) -> bool:
        """Commit plans in flight before their report, to have their sources at once.

        Sound because the worker joins their copies before the next forward, the first thing
        that may write to the freed sources; only a failed copy can no longer be rolled back.

        Returns:
            Whether any plan was committed. It frees at least one block, unless others came to
            share its sources through the prefix cache.
        """
        early = False
        for ticket, plans in self._in_flight.items():
            for plan in [plan for plan in plans if not plan.orphaned]:
                kv = requests[plan.req_id]
                plans.remove(plan)
                kv.plan = None
                self._commit(kv, plan)
                self._free_emptied(kv, plan)
                self._unproven.setdefault(ticket, []).append(kv)
                early = True
        return early

    # -- settle ----------------------------------------------------------------------------

    def request_gone(self, kv: RequestKV) -> None:
        """The request finished, was aborted or preempted: its plan can only be rolled back.

        The destinations stay taken until the worker reports the copy, which may still be
        writing to them.
        """
        if kv.plan is not None:
            kv.plan.orphaned = True
            kv.plan = None

    def withdraw(self, plans: list[RelocationPlan], requests: dict[str, RequestKV]) -> None:
        """Take back a batch that :meth:`plan_step` reserved and that was not sent."""
        del self._in_flight[plans[0].ticket]
        for plan in plans:
            requests[plan.req_id].plan = None
            self._roll_back(plan, "failed")

    def abandon(self, requests: dict[str, RequestKV]) -> None:
        """Roll back all plans in flight before their report, to have every block at once.

        Sound for the reason of :meth:`commit_early`: the worker joins their copies before the
        next forward, the first thing that may write to the destinations. The reports still come.
        """
        for ticket, plans in self._in_flight.items():
            self._in_flight[ticket] = []
            for plan in plans:
                self._roll_back(plan, "rolled_back")
                if not plan.orphaned:
                    kv = requests[plan.req_id]
                    kv.plan = None
                    self._free_emptied(kv, plan)

    def settle(
        self,
        ticket: int,
        error: str | None,
        requests: dict[str, RequestKV],
        damaged: Collection[str] = (),
        trusted: bool = True,
    ) -> Settled:
        """Commit or roll back the batch that the worker reports.

        Args:
            ticket: the batch.
            error: why its copy failed, or None.
            requests: live requests by id.
            damaged: requests whose copies are complete and wrong.
            trusted: False rolls back whatever can be, right or wrong.

        Raises:
            PlanError: this batch was never sent, or was reported before. Plans of requests that
                ended are outstanding until their report, so no other report is to be expected.
        """
        if ticket not in self._in_flight and ticket not in self._unproven:
            raise PlanError(
                f"batch {ticket} was reported, outstanding are "
                f"{sorted(self._in_flight.keys() | self._unproven.keys())}; "
                f"the last one had number {self._next_ticket - 1}"
            )
        early = self._unproven.pop(ticket, [])
        committed = [kv for kv in early if error is None and kv.req_id not in damaged]
        # A preempted request is computed again and needs nothing of its old blocks.
        lost = [kv for kv in early if kv not in committed and requests.get(kv.req_id) is kv]
        for plan in self._in_flight.pop(ticket, ()):
            if plan.orphaned:
                self._roll_back(plan, "rolled_back")
                continue
            kv = requests[plan.req_id]
            kv.plan = None
            if error is not None or plan.req_id in damaged:
                self._roll_back(plan, "failed")
            elif not trusted:
                self._roll_back(plan, "rolled_back")
            else:
                self._commit(kv, plan)
                committed.append(kv)
            self._free_emptied(kv, plan)
        return Settled(committed, lost)

    def _roll_back(self, plan: RelocationPlan, outcome: str) -> None:
        self._pool.free(plan.dst_blocks[::-1].tolist())
        self._stats.inc("relocations_total", 1, outcome)

    def _commit(self, kv: RequestKV, plan: RelocationPlan) -> None:
        moves = plan.moves
        alive = kv.table.is_live(moves.token_ids)  # some may have been evicted meanwhile
        dst_slots = moves.dst_slots[alive]
        kv.table.apply_moves(moves.token_ids[alive], moves.src_slots[alive], dst_slots)
        sources = kv.blocks.ids[plan.source_indices].copy()
        size = kv.table.block_size
        filled = np.arange(moves.num_moves) // size  # destination of each move, before losses
        dst_live = np.bincount(filled[alive], minlength=len(plan.dst_blocks)).astype(np.int32)
        kv.blocks.relocate(plan.source_indices, plan.dst_blocks, dst_live)
        self._pool.replace(
            kv.req_id, plan.source_indices.tolist(), _padded(plan.dst_blocks, len(sources))
        )
        self._count_freed(int((~self._pool.shared(sources)).sum()) - len(plan.dst_blocks))
        self._pool.free(sources[::-1].tolist())
        kv.send_row()
        self._stats.inc("relocations_total", 1, "committed")
        self._stats.inc("relocated_tokens_total", len(dst_slots))

    def _count_freed(self, num_blocks: int) -> None:
        """Net gain of one plan. Of a group that lets go of shared blocks only the last one gains:
        what the others spent on destinations is set against it, so that the counter only grows.
        """
        self._net_freed += num_blocks
        if self._net_freed > 0:
            self._stats.inc("freed_blocks_total", self._net_freed, "relocation")
            self._net_freed = 0

    def _free_emptied(self, kv: RequestKV, plan: RelocationPlan) -> None:
        """Give back the plan's places that evictions emptied while it held them."""
        places = plan.source_indices
        empty = places[(kv.blocks.num_live[places] == 0) & (kv.blocks.ids[places] != 0)]
        if not len(empty):
            return
        kv.give_back(empty, self._pool)
        self._stats.inc("freed_blocks_total", len(empty), "empty")


def _by_waste(requests: Iterable[tuple[RequestKV, int]]) -> list[tuple[RequestKV, int]]:
    """Requests that hold more blocks than their live tokens need, most wasteful first."""
    candidates = list(requests)
    if not candidates:
        return []
    store = candidates[0][0].store
    rows = np.fromiter((kv.row for kv, _ in candidates), np.int64, len(candidates))
    waste = store.num_retained[rows] + -store.num_live[rows] // store.block_size
    order = np.argsort(-waste, kind="stable")
    return [candidates[i] for i in order[: np.count_nonzero(waste > 0)].tolist()]


def _padded(dst_blocks: NDArray[np.int32], length: int) -> list[int]:
    """Destination ids followed by the null block for places that are given back."""
    ids: list[int] = dst_blocks.tolist()
    return ids + [0] * (length - len(ids))
