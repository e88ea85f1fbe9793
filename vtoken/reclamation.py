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

from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from vtoken.commits import Commits, Settled
from vtoken.config import VTokenConfig
from vtoken.errors import PlanError
from vtoken.occupancy import BlockOccupancy
from vtoken.planner import Rejection
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.reservations import Reservations, by_waste
from vtoken.stats import VTokenStats
from vtoken.threshold import Bounds, Threshold, next_threshold

_REFUSED = Rejection("refused")


class ReclamationManager:
    """Plans relocations and carries them through; owns every plan in flight.

    Attributes:
        approves: asked for each plan that is committed as it is made, with the number of tokens
            whose K/V is complete: False takes the plan back.
        reservations: makes the plans.
    """

    def __init__(
        self,
        config: VTokenConfig,
        pool: BlockPoolPort,
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        self._threshold = Threshold(config.theta_f)
        self._pool = pool
        self._occupancy = occupancy
        self._stats = stats
        self.reservations = Reservations(config, pool, occupancy, stats)
        self._commits = Commits(pool, stats)
        self._in_flight: dict[int, list[RelocationPlan]] = {}
        self._urgent: list[RelocationPlan] = []
        self._next_ticket = 1
        self._steps_to_check = 0
        self.approves: Callable[[RelocationPlan, int], bool] = lambda plan, num_computed: True

    @property
    def _config(self) -> VTokenConfig:
        return self.reservations.config

    def reconfigure(self, config: VTokenConfig) -> None:
        """Use other thresholds from the next step on; plans in flight are not affected."""
        if (config.theta_f, config.theta_f_mode) != (
            self._config.theta_f,
            self._config.theta_f_mode,
        ):
            self._threshold = Threshold(config.theta_f)
        self.reservations.config = config
        self._steps_to_check = 0

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
        return bool(self._urgent or self._commits.unproven or self.num_in_flight)

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
        plans = self.reservations.for_step(requests)
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
        for kv, num_computed in by_waste(requests):
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
        plan = self.reservations.at_once(kv, num_computed, max_sources)
        if isinstance(plan, Rejection):
            return plan
        self._stamp([plan])
        kv.plan = None
        if not self.approves(plan, num_computed):
            self.reservations.give_back(plan, "failed")
            return _REFUSED
        self._commits.commit_early(kv, plan)
        self._urgent.append(plan)
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
        for plans in self._in_flight.values():
            for plan in [plan for plan in plans if not plan.orphaned]:
                kv = requests[plan.req_id]
                plans.remove(plan)
                kv.plan = None
                self._commits.commit_early(kv, plan)
                self._commits.free_emptied(kv, plan)
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
            self.reservations.give_back(plan, "failed")

    def abandon(self, requests: dict[str, RequestKV]) -> None:
        """Roll back all plans in flight before their report, to have every block at once.

        Sound for the reason of :meth:`commit_early`: the worker joins their copies before the
        next forward, the first thing that may write to the destinations. The reports still come.
        """
        for ticket, plans in self._in_flight.items():
            self._in_flight[ticket] = []
            for plan in plans:
                self.reservations.give_back(plan, "rolled_back")
                if not plan.orphaned:
                    kv = requests[plan.req_id]
                    kv.plan = None
                    self._commits.free_emptied(kv, plan)

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
        outstanding = self._in_flight.keys() | self._commits.unproven
        if ticket not in outstanding:
            raise PlanError(
                f"batch {ticket} was reported, outstanding are {sorted(outstanding)}; "
                f"the last one had number {self._next_ticket - 1}"
            )
        settled = self._commits.prove(ticket, error, requests, damaged)
        for plan in self._in_flight.pop(ticket, ()):
            # A copy never fails because its request ended: it tells of the device all the same.
            has_failed = error is not None or plan.req_id in damaged
            stands = trusted and not has_failed and not plan.orphaned
            if not stands:
                self.reservations.give_back(plan, "failed" if has_failed else "rolled_back")
            if plan.orphaned:
                continue
            kv = requests[plan.req_id]
            kv.plan = None
            if stands:
                self._commits.commit(kv, plan)
                settled.committed.append(kv)
            self._commits.free_emptied(kv, plan)
        return settled
