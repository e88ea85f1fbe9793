"""The token layer: one object that a block-based scheduler drives, step by step.

Knows nothing of vLLM; the scheduler subclass, the property tests and the bookkeeping benchmark
all drive this same object. Order within one engine step:

    admit / schedule_tokens    for every request that runs in the step
    plan_relocations           after the scheduler has decided, before the message is sent
    settle                     when the worker's report arrives, before anything else
    evict_if_due               for every request whose tokens were computed
    forget                     at any time: finished, aborted or preempted
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken import invariants
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, InvariantViolationError
from vtoken.eviction import Evictor
from vtoken.observation import (
    ATTENTION_SIGNALS,
    ObservationSpec,
    Observe,
    RequestSignals,
    queries_to_observe,
)
from vtoken.occupancy import BlockOccupancy
from vtoken.ports import BlockPoolPort
from vtoken.reclamation import ReclamationManager
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import VTokenStats
from vtoken.token_table import TokenTable
from vtoken.types import SlotArray

SAMPLED_VERIFY_INTERVAL = 16
"""With ``verify=sampled`` one batch in this many is hashed and checked."""


class TokenLayer:
    """Tables, eviction and reclamation of all running requests over one block pool."""

    def __init__(self, config: VTokenConfig, pool: BlockPoolPort) -> None:
        """Start with no request.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        self.config = config
        self.policy_version = 1
        self.stats = VTokenStats()
        self.requests: dict[str, RequestKV] = {}
        self.occupancy = BlockOccupancy(pool.num_total_blocks + 1, pool.block_size)
        self.evictor = Evictor(config, pool, self.stats)
        self.reclamation = ReclamationManager(config, pool, self.occupancy, self.stats)
        self._pool = pool
        self._check_headroom(config)

    # -- requests --------------------------------------------------------------------------

    def admit(
        self, req_id: str, num_prompt_tokens: int, prefill_end: int, request_seed: int
    ) -> RequestKV:
        """Start to track a request that is new or resumed after preemption.

        Args:
            req_id: id, not tracked yet.
            num_prompt_tokens: length of the prompt.
            prefill_end: logical length at which its prefill is complete; no eviction before.
            request_seed: see :class:`~vtoken.policies.base.LiveView`.
        """
        assert req_id not in self.requests, f"request {req_id} is already tracked"
        table = TokenTable(self._pool.block_size)
        blocks = self.occupancy.new_request()
        kv = RequestKV(
            req_id, table, blocks, num_prompt_tokens, request_seed, prefill_end, prefill_end
        )
        self.requests[req_id] = kv
        return kv

    def forget(self, req_id: str) -> None:
        """Stop tracking a request whose blocks vLLM is about to free; unknown ids are fine."""
        kv = self.requests.pop(req_id, None)
        if kv is None:
            return
        self.stats.observe("request_retained_blocks", kv.blocks.retained)
        self.stats.observe("request_evicted_tokens", kv.num_evicted)
        kv.blocks.clear()
        self.reclamation.request_gone(kv)

    # -- one step --------------------------------------------------------------------------

    def schedule_tokens(self, kv: RequestKV, num_before: int, num_after: int) -> SlotArray | None:
        """Register the tokens that this step will compute.

        Args:
            kv: the request; tokens ``num_before … num_after - 1`` are new. Tokens below
                ``num_before`` that are not yet known come from the prefix cache.
            num_before, num_after: logical lengths before and after the step.

        Returns:
            Slots of live tokens below ``num_before`` if the worker's row must be rebuilt,
            else None.
        """
        if num_before == kv.num_tokens and num_after <= kv.capacity and not kv.row_stale:
            # Decode inside the last block. All requests come here in every step, so this is
            # kv.announce_tokens(num_after) without its calls.
            self.occupancy.live_tokens += num_after - num_before
            kv.num_tokens = num_after
            return None
        grows = num_after > kv.capacity
        if grows:
            kv.add_blocks(self._pool.new_blocks(kv.req_id, kv.num_places))
        if num_before > kv.num_tokens:
            kv.announce_tokens(num_before)
        row = kv.table.live_slots() if kv.row_stale else None
        if row is not None:
            kv.kept_columns = self._kept_columns(kv)
            kv.row_ids = None
        kv.row_stale = False
        if num_after > kv.num_tokens:
            kv.announce_tokens(num_after)
        if grows:
            kv.write_announced()  # an empty block would make every eviction look for more
        return row

    def _kept_columns(self, kv: RequestKV) -> NDArray[np.int32] | None:
        if kv.row_ids is None or not self.evictor.policy.signals:
            return None
        kept: NDArray[np.int32] = np.flatnonzero(kv.table.is_live(kv.row_ids)).astype(np.int32)
        return kept

    def observation(self) -> ObservationSpec | None:
        """What the worker must observe for the present policy; None: nothing at all."""
        signals = self.evictor.policy.signals
        return ObservationSpec(signals, self.config.score_layers) if signals else None

    def to_observe(self, kv: RequestKV, num_before: int, num_after: int) -> Observe | None:
        """Which queries of a step are observed; see :func:`queries_to_observe`."""
        signals, config = self.evictor.policy.signals, self.config
        return queries_to_observe(
            signals, config, num_before, num_after, kv.prefill_end, kv.next_evict_at
        )

    def wants_signals(self, kv: RequestKV, num_computed: int) -> bool:
        """Whether the worker must report signals for an eviction after this step."""
        return self.evictor.wants_signals(kv, num_computed)

    def plan_relocations(self, computed: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Reserve relocations for this step; see :meth:`ReclamationManager.plan_step`."""
        computed = list(computed)
        plans = self.reclamation.plan_step(computed)
        if plans and self.verifies(plans[0].ticket):
            done = {kv.req_id: num_computed for kv, num_computed in computed}
            for plan in plans:
                self._checked("I4", self._check_plan, plan, done[plan.req_id])
        return plans

    def reclaim_now(self) -> bool:
        """Free a block at once: commit what is in flight, else pack some request.

        Every token that a table knows is complete before the next forward, so candidates are
        all requests, whether they run in the step being scheduled or not.

        Returns:
            Whether at least one block became free.
        """
        free = self._pool.num_free_blocks()
        self.reclamation.commit_early(self.requests)
        if self._pool.num_free_blocks() > free:
            return True
        candidates = [(kv, kv.table.num_tokens) for kv in self.requests.values()]
        return self.reclamation.reclaim_now(candidates) is not None

    def settle(self, ticket: int, error: str | None) -> list[str]:
        """Commit or roll back a batch that the worker reported.

        Returns:
            Ids of requests that must end with an error, see :class:`~vtoken.reclamation.Settled`.
        """
        settled = self.reclamation.settle(ticket, error, self.requests)
        if self.verifies(ticket):
            for kv in settled.committed:
                if self.requests.get(kv.req_id) is kv:
                    self._checked("I2", invariants.check_unique_mapping, kv)
        return [kv.req_id for kv in settled.lost]

    def evict_if_due(
        self, kv: RequestKV, num_computed: int, signals: RequestSignals | None = None
    ) -> None:
        """Evict down to the budget if the request is due; see :meth:`Evictor.evict_if_due`."""
        self.evictor.evict_if_due(kv, num_computed, signals)

    # -- verification ----------------------------------------------------------------------

    def verifies(self, ticket: int) -> bool:
        """Whether this batch is checked online (``verify``)."""
        level = self.config.verify
        return level == "full" or (level == "sampled" and ticket % SAMPLED_VERIFY_INTERVAL == 0)

    def check_conservation(self, req_id: str, num_tokens: int, before: str, after: str) -> None:
        """I1 from the worker's digests, counted."""
        self._checked("I1", invariants.check_conservation, req_id, num_tokens, before, after)

    def check_row(self, req_id: str, row: SlotArray) -> None:
        """I2 across processes: the forward read exactly the slots that the table names.

        Only meaningful before anything changed since that forward was scheduled.
        """
        kv = self.requests.get(req_id)
        if kv is not None:
            self._checked("I2", invariants.check_row, kv, row)

    def check_all(self) -> None:
        """Every invariant that can be read off the state, of every request.

        Raises:
            InvariantViolationError: one does not hold; carries the numbers.
        """
        for kv in self.requests.values():
            invariants.check_unique_mapping(kv)
        invariants.check_totals(self.occupancy, list(self.requests.values()))

    def _check_plan(self, plan: RelocationPlan, num_computed: int) -> None:
        invariants.check_plan(self.requests[plan.req_id], plan, num_computed)

    def _checked(self, invariant: str, check: Any, *args: Any) -> None:
        self.stats.inc("invariant_checks_total", 1, invariant)
        try:
            check(*args)
        except InvariantViolationError:
            self.stats.inc("invariant_violations_total", 1, invariant)
            raise

    # -- control ---------------------------------------------------------------------------

    def patch(self, changes: Mapping[str, Any]) -> VTokenConfig:
        """Change live settings; running requests are due at once under the new ones.

        Raises:
            ConfigError: a field is unknown, fixed or out of bounds; nothing was changed.
        """
        config = self.config.patched(changes)
        self._check_headroom(config)
        before = self.evictor.policy.signals
        self.evictor.reconfigure(config)
        self.reclamation.reconfigure(config)
        self.config = config
        self.policy_version += 1
        self.stats.inc("policy_changes_total")
        unobserved = bool((self.evictor.policy.signals - before) & ATTENTION_SIGNALS)
        for kv in self.requests.values():
            kv.next_evict_at = kv.prefill_end
            if unobserved and kv.table.num_tokens >= kv.prefill_end:
                # Scores of the old policy's making, or none: observe for one interval first.
                self.evictor.postpone(kv, kv.table.num_tokens)
        return config

    def _check_headroom(self, config: VTokenConfig) -> None:
        total = self._pool.num_total_blocks
        if config.headroom_blocks >= total:
            bound = f"headroom_blocks < {total}, the blocks of the pool"
            raise ConfigError("headroom_blocks", config.headroom_blocks, bound)

    @property
    def headroom_blocks(self) -> int:
        """Blocks that waiting requests must leave; none unless blocks are relocated."""
        return self.config.headroom_blocks if self.config.relocates else 0

    def pool_state(self) -> dict[str, float]:
        """Gauges of the pool as plain numbers, named as the metrics are."""
        for kv in self.requests.values():
            kv.write_announced()  # n_b, for the share of low utilisation
        live = self.occupancy.live_tokens
        return {
            "waste_ratio": self.occupancy.waste_ratio,
            "low_utilization_block_ratio": self.occupancy.low_utilization_block_ratio,
            "live_tokens": live,
            "dead_tokens": sum(kv.num_evicted for kv in self.requests.values()),
            "retained_blocks": self.occupancy.retained_blocks,
            "ideal_blocks": sum(kv.ideal_blocks for kv in self.requests.values()),
            "free_blocks": self._pool.num_free_blocks(),
            "total_blocks": self._pool.num_total_blocks,
            "headroom_blocks": self.headroom_blocks,
            "in_flight_relocations": self.reclamation.num_in_flight,
        }

    def snapshot(self) -> dict[str, Any]:
        """Metrics, configuration and policy version as plain data."""
        for name, value in self.pool_state().items():
            self.stats.set(name, value)
        return {
            "stats": self.stats.snapshot(),
            "config": self.config.to_dict(),
            "policy_version": self.policy_version,
        }
