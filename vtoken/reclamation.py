"""The reclamation backend (paper §3.3): turns holes into free blocks, in two phases.

    reserve    stages 1–3: F > θ_F near the watermark, headroom, plan; destinations are taken
    send       the batch rides to the worker; sources stay in place and are still read
    settle     the worker reports the copy: commit (table, block list, sources freed), or, if
               the copy failed or the request is gone, give the destinations back

Nothing that a forward may read changes before the copy is known to be complete (I3), and a
request has at most one plan in flight (I4).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vtoken.config import VTokenConfig
from vtoken.occupancy import BlockOccupancy
from vtoken.planner import BlockSnapshot, Rejection, SourceChoice, build_moves, choose_sources
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import VTokenStats


class ReclamationManager:
    """Plans relocations and carries them through; owns every plan in flight."""

    def __init__(
        self,
        config: VTokenConfig,
        pool: BlockPoolPort,
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        self._config = config
        self._pool = pool
        self._occupancy = occupancy
        self._stats = stats
        self._in_flight: dict[int, list[RelocationPlan]] = {}
        self._next_ticket = 1
        self._steps_to_check = 0

    def reconfigure(self, config: VTokenConfig) -> None:
        """Use other thresholds from the next step on; plans in flight are not affected."""
        self._config = config

    @property
    def num_in_flight(self) -> int:
        """Plans sent and not yet settled, orphaned ones included."""
        return sum(len(plans) for plans in self._in_flight.values())

    def blocks_in_flight(self) -> int:
        """Destination blocks held by plans in flight."""
        return sum(len(p.dst_blocks) for plans in self._in_flight.values() for p in plans)

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
        reason = self._not_eligible()
        if reason is not None:
            self._stats.inc("reclaim_skipped_total", 1, reason)
            return []
        plans = self._reserve_plans(requests)
        if plans:
            self._in_flight[self._next_ticket] = plans
            for plan in plans:
                plan.ticket = self._next_ticket
            self._next_ticket += 1
        return plans

    def _not_eligible(self) -> str | None:
        """Stage 1: the reason not to look at requests at all, or None."""
        if self._occupancy.waste_ratio <= self._config.theta_f:
            return "below_theta_f"
        watermark = self._config.low_watermark_ratio * self._pool.num_total_blocks
        if self._pool.num_free_blocks() > watermark:
            return "above_watermark"
        return None

    def _reserve_plans(self, requests: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Stages 2 and 3, most wasteful request first."""
        wasteful = [(kv, done) for kv, done in requests if kv.blocks.retained > kv.ideal_blocks]
        wasteful.sort(key=lambda item: item[0].ideal_blocks - item[0].blocks.retained)
        plans = []
        for kv, num_computed in wasteful:
            if kv.plan is not None:
                self._stats.inc("reclaim_skipped_total", 1, "in_flight")
                continue
            choice = self._choose(kv, num_computed)
            if isinstance(choice, Rejection):
                self._stats.inc("reclaim_skipped_total", 1, choice.reason)
                continue
            plans.append(self._reserve(kv, choice))
        return plans

    def _choose(self, kv: RequestKV, num_computed: int) -> SourceChoice | Rejection:
        ids = kv.blocks.ids
        eligible = (ids != 0) & ~self._pool.shared(ids)
        eligible[num_computed // kv.table.block_size :] = False
        snapshot = BlockSnapshot(kv.blocks.num_live, eligible, kv.table.block_size)
        return choose_sources(
            snapshot, self._config.max_source_blocks, self._pool.num_free_blocks()
        )

    def _reserve(self, kv: RequestKV, choice: SourceChoice) -> RelocationPlan:
        dst_blocks = self._pool.allocate(choice.num_destinations)
        live_ids = kv.table.live_ids()
        moves = build_moves(
            live_ids,
            kv.table.slots_of(live_ids),
            kv.blocks.ids[choice.indices],
            dst_blocks,
            kv.table.block_size,
        )
        kv.plan = RelocationPlan(kv.req_id, choice.indices, dst_blocks, moves)
        return kv.plan

    # -- settle ----------------------------------------------------------------------------

    def request_gone(self, kv: RequestKV) -> None:
        """The request finished, was aborted or preempted: its plan can only be rolled back.

        The destinations stay taken until the worker reports the copy, which may still be
        writing to them.
        """
        if kv.plan is not None:
            kv.plan.orphaned = True
            kv.plan = None

    def settle(self, ticket: int, error: str | None, requests: dict[str, RequestKV]) -> list[str]:
        """Commit or roll back the batch that the worker reports.

        Args:
            ticket: the batch.
            error: why its copy failed, or None.
            requests: live requests by id.

        Returns:
            Ids of requests whose plan was committed.
        """
        committed = []
        for plan in self._in_flight.pop(ticket):
            if plan.orphaned:
                self._roll_back(plan, "rolled_back")
                continue
            kv = requests[plan.req_id]
            kv.plan = None
            if error is not None:
                self._roll_back(plan, "failed")
                continue
            self._commit(kv, plan)
            committed.append(plan.req_id)
        return committed

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
        self._pool.free(sources[::-1].tolist())
        kv.row_stale = True
        self._stats.inc("relocations_total", 1, "committed")
        self._stats.inc("relocated_tokens_total", len(dst_slots))
        self._stats.inc("freed_blocks_total", len(sources) - len(plan.dst_blocks), "relocation")


def _padded(dst_blocks: NDArray[np.int32], length: int) -> list[int]:
    """Destination ids followed by the null block for places that are given back."""
    ids: list[int] = dst_blocks.tolist()
    return ids + [0] * (length - len(ids))
