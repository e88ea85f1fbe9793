"""The token layer: one object that a block-based scheduler drives, step by step.

Knows nothing of vLLM; the scheduler subclass, the property tests and the bookkeeping benchmark
all drive this same object. Order within one engine step:

    admit, schedule_step       for every request that runs in the step
    plan_relocations           after the scheduler has decided, before the message is sent
    settle                     when the worker's report arrives, before anything else
    evict_due                  for every request whose tokens were computed
    forget                     at any time: finished, aborted or preempted
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from vtoken.cache_room import Growth
from vtoken.config import VTokenConfig
from vtoken.documents import Document
from vtoken.eviction import Due, Evictor
from vtoken.eviction_choice import first_eviction_at
from vtoken.observation import (
    ObservationSpec,
    Observe,
    RequestSignals,
    queries_to_observe,
)
from vtoken.occupancy import BlockOccupancy
from vtoken.policy_control import PolicyControl
from vtoken.ports import BlockPoolPort
from vtoken.receipts import Receipts
from vtoken.reclamation import ReclamationManager
from vtoken.request_kv import RelocationPlan, RequestKV, RowChange
from vtoken.request_options import NO_OPTIONS, RequestOptions
from vtoken.roster import Roster
from vtoken.stats import UTILIZATIONS, VTokenStats
from vtoken.types import IdArray
from vtoken.verification import Verification


class TokenLayer:
    """Tables, eviction and reclamation of all running requests over one block pool."""

    def __init__(self, config: VTokenConfig, pool: BlockPoolPort) -> None:
        """Start with no request.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        self.stats = VTokenStats()
        self.occupancy = BlockOccupancy(pool.num_total_blocks + 1, pool.block_size)
        self.roster = Roster(pool, self.occupancy)
        self.requests = self.roster.requests
        self.evictor = Evictor(config, pool, self.occupancy, self.stats)
        self.reclamation = ReclamationManager(config, pool, self.occupancy, self.stats)
        self.control = PolicyControl(
            self.evictor, self.reclamation, self.requests, pool, self.stats
        )
        self.control.on_change = self._observe_what_is_needed
        self.verification = Verification(
            self.evictor.documents, self.requests, self.occupancy, self.stats
        )
        self.verification.on_violation = self.control.stop_relocation
        self.reclamation.approves = self.verification.approves
        self.reclamation.reservations.growth = self._growth
        self.receipts = Receipts()
        self._pool = pool
        self._observation: ObservationSpec | None = None
        self._observe_what_is_needed()

    @property
    def config(self) -> VTokenConfig:
        """In force for new requests and for the pool; some requests may keep an older one."""
        return self.evictor.documents.current.config

    @property
    def policy_version(self) -> int:
        """Of the policy document in force."""
        return self.evictor.documents.current.version

    # -- requests --------------------------------------------------------------------------

    def admit(
        self,
        req_id: str,
        num_prompt_tokens: int,
        prefill_end: int,
        request_seed: int,
        options: RequestOptions = NO_OPTIONS,
        generation: int | None = None,
        max_num_tokens: int | None = None,
    ) -> RequestKV:
        """Start to track a request that is new or resumed after preemption.

        Args:
            req_id: id, not tracked yet.
            num_prompt_tokens: length of the prompt.
            prefill_end: logical length at which its prefill is complete; no eviction before,
                unless ``evict_during_prefill``.
            request_seed: see :class:`~vtoken.policies.base.LiveView`.
            options: what the request itself asks for; its policy must exist.
            generation: ``documents.generation`` at its arrival; by default it arrives now.
            max_num_tokens: logical length that it cannot exceed, if known.
        """
        assert req_id not in self.requests, f"request {req_id} is already tracked"
        blocks = self.occupancy.new_request()
        documents = self.evictor.documents
        generation = documents.generation if generation is None else generation
        store = self.occupancy.store
        kv = RequestKV(req_id, store, blocks, num_prompt_tokens, request_seed, prefill_end)
        kv.options, kv.generation, kv.max_num_tokens = options, generation, max_num_tokens
        kv.next_evict_at = first_eviction_at(documents.of(generation).config, prefill_end)
        kv.send_row()
        self.roster.add(kv)
        if self._may_need_other_signals(kv):
            self._observe_what_is_needed()
        return kv

    def forget(self, req_id: str, num_in_flight: int = 0, *, ended: bool = True) -> None:
        """Stop tracking a request whose blocks vLLM is about to free; unknown ids are fine.

        Args:
            req_id: request.
            num_in_flight: of its tokens, those that are still being computed, for nothing.
            ended: False if it is preempted, and will come back.
        """
        kv = self.roster.remove(req_id)
        if kv is None:
            return
        if kv.options.receipt:
            self._add_receipt(kv, num_in_flight)
        if self._may_need_other_signals(kv):
            self._observe_what_is_needed()
        if ended:
            self.stats.observe("request_retained_blocks", kv.blocks.retained)
            self.stats.observe("request_evicted_tokens", kv.num_evicted)
        kv.blocks.clear()
        self.reclamation.request_gone(kv)

    # -- one step --------------------------------------------------------------------------

    def schedule_step(
        self, num_scheduled: Mapping[str, int], lengths: IdArray
    ) -> dict[str, RowChange]:
        """Register the tokens that a step will compute; see :meth:`Roster.schedule_step`."""
        return self.roster.schedule_step(num_scheduled, lengths)

    def schedule_tokens(self, kv: RequestKV, num_before: int, num_after: int) -> RowChange | None:
        """:meth:`schedule_step` for one request; its tokens ``num_before … num_after - 1`` are
        new."""
        lengths = np.array([num_after])
        return self.schedule_step({kv.req_id: num_after - num_before}, lengths).get(kv.req_id)

    def observation(self) -> ObservationSpec | None:
        """What the worker must observe for the policies in use; None: nothing at all."""
        return self._observation

    def _may_need_other_signals(self, kv: RequestKV) -> bool:
        """Whether the request has another policy than new requests without options get."""
        kept = self.evictor.documents.is_kept(kv.generation)
        return kept or kv.options.policy_key is not None

    def _observe_what_is_needed(self) -> None:
        """After policies in use changed: the service's, and those of single requests."""
        others = filter(self._may_need_other_signals, self.requests.values())
        signals = self.evictor.policy.signals.union(*map(self.signals_of, others))
        layers = self.config.score_layers
        self._observation = ObservationSpec(signals, layers) if signals else None

    def signals_of(self, kv: RequestKV) -> frozenset[str]:
        """The signals that the policy of this request needs."""
        return self.evictor.policy_of(kv).signals

    def to_observe(self, kv: RequestKV, num_before: int, num_after: int) -> Observe | None:
        """Which queries of a step are observed; see :func:`queries_to_observe`."""
        config = self.evictor.document_of(kv).config
        return queries_to_observe(
            self.signals_of(kv),
            config,
            num_before,
            num_after,
            kv.prefill_end,
            kv.next_evict_at,
            self.evictor.may_evict(config),
            kv.window_missed,
        )

    def wants_signals(self, kv: RequestKV, num_computed: int) -> bool:
        """Whether the worker must report signals for an eviction after this step."""
        return self.evictor.wants_signals(kv, num_computed)

    def plan_relocations(self, computed: Iterable[tuple[RequestKV, int]]) -> list[RelocationPlan]:
        """Reserve relocations for this step; see :meth:`ReclamationManager.plan_step`.

        Nobody looks at ``computed`` unless the pool is worth a look.
        """
        documents = self.evictor.documents.in_use()
        if any(d.config.max_blocks_per_request is not None for d in documents):
            # Capped requests are packed when they are cut, and at no other time.
            computed = (item for item in computed if not self._is_capped(item[0]))
        plans = self.reclamation.plan_step(computed)
        if not plans or not self.verification.covers(plans[0].ticket):
            return plans
        if not all([self.verification.approves(plan, plan.num_computed) for plan in plans]):
            self.reclamation.withdraw(plans, self.requests)
            return []
        return plans

    def _growth(self) -> Growth:
        """Of all requests together."""
        total = self._pool.num_total_blocks
        grow = [kv.growth(total) for kv in self.requests.values()]
        return Growth(sum(soon for soon, _ in grow), sum(in_all for _, in_all in grow))

    def abandon_relocations(self) -> None:
        """Give back what relocations in flight hold; see :meth:`ReclamationManager.abandon`."""
        self.reclamation.abandon(self.requests)

    def reclaim_now(self, granted: Collection[str] = ()) -> bool:
        """Free a block at once: commit what is in flight, else pack some request, else evict
        before requests are due (see :meth:`Evictor.evict_early`) and pack again.

        Every token that a table knows is complete before the next forward, so candidates are
        all requests, whether they run in the step being scheduled or not.

        Args:
            granted: requests that got their blocks for the step being scheduled. vLLM has
                entered these blocks into the prefix cache already, so a first eviction now
                would let others find K/V that depends on it: they are not evicted early.

        Returns:
            Whether at least one block became free.
        """
        free = self._pool.num_free_blocks()
        if self.config.relocates:
            self.reclamation.commit_early(self.requests)
            if self._pool.num_free_blocks() > free or self._pack_now():
                return True
        for kv in self.requests.values():
            if kv.num_evicted or kv.req_id not in granted:
                self.evictor.evict_early(kv)
        if self._pool.num_free_blocks() > free:
            return True
        return self.config.relocates and self._pack_now()

    def _pack_now(self) -> bool:
        candidates = [(kv, kv.table.num_tokens) for kv in self.requests.values()]
        return self.reclamation.reclaim_now(candidates) is not None

    def settle(
        self,
        ticket: int,
        error: str | None,
        damaged: Collection[str] = (),
        stall_seconds: float = 0.0,
    ) -> list[str]:
        """Commit or roll back a batch that the worker reported.

        Args:
            ticket: the batch.
            error: why its copy failed, or None.
            damaged: requests for which :meth:`check_conservation` did not hold.
            stall_seconds: how long the forward after it waited for its copies.

        Returns:
            Ids of requests that must end with an error: their K/V is gone, because a plan was
            committed before its copy failed, or because their table is broken.
        """
        trusted = self.control.relocation_disabled is None
        settled = self.reclamation.settle(ticket, error, self.requests, damaged, trusted)
        lost = [kv.req_id for kv in settled.lost]
        for kv in settled.committed:
            kv.num_relocations += 1
            kv.stall_seconds += stall_seconds
        if self.verification.covers(ticket):
            for kv in settled.committed:
                if self.requests.get(kv.req_id) is not kv:
                    continue
                if not self.verification.check_mapping(kv):
                    lost.append(kv.req_id)
        return lost

    def evict_due(self, step: Iterable[Due]) -> None:
        """Evict down to the budget where an eviction is due; see :meth:`Evictor.evict_due`.

        Under ``max_blocks_per_request`` what is left of a request is packed at once.
        """
        for kv, num_computed, _ in self.evictor.evict_due(step):
            if self.config.relocates and self._is_capped(kv):
                self.reclamation.compact(kv, num_computed)

    def evict_if_due(
        self, kv: RequestKV, num_computed: int, signals: RequestSignals | None = None
    ) -> None:
        """:meth:`evict_due` for one request."""
        self.evict_due([Due(kv, num_computed, signals)])

    def _is_capped(self, kv: RequestKV) -> bool:
        return self.evictor.document_of(kv).config.max_blocks_per_request is not None

    # -- what can be read ------------------------------------------------------------------

    def receipt(self, key: str) -> dict[str, Any]:
        """What became of the requests that asked for a receipt under ``key``; takes it.

        Of one that still runs, the numbers so far.
        """
        for kv in self.requests.values():
            if kv.options.receipt == key:
                self._add_receipt(kv)
        taken = self.receipts.take(key)
        if taken["policy_version"] is None:
            taken["policy_version"] = self.policy_version
        return taken

    def _add_receipt(self, kv: RequestKV, num_in_flight: int = 0) -> None:
        version = self.evictor.document_of(kv).version
        self.receipts.add(kv, self.evictor.policy_of(kv).name, version, num_in_flight)

    @property
    def headroom_blocks(self) -> int:
        """Blocks that waiting requests must leave; none unless blocks are relocated."""
        return self.config.headroom_blocks if self.config.relocates else 0

    @property
    def admits_in_parts(self) -> bool:
        """Whether any prompt may be larger than the free part of the pool."""
        return any(map(self.admits_in_parts_under, self.evictor.documents.in_use()))

    def admits_in_parts_under(self, document: Document) -> bool:
        """Whether prompts under this document may be larger than the free part of the pool.

        Only where what is evicted between its chunks is sure to become free blocks: in ``naive``
        a few scattered survivors would keep them all, and the request would be preempted.
        """
        relocates = self.config.relocates
        return document.config.evict_during_prefill and relocates and document.policy.evicts

    def pool_state(self) -> dict[str, float]:
        """Gauges of the pool as plain numbers, named as the metrics are."""
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
            "effective_theta_f": self.reclamation.theta_f,
            "relocation_disabled": float(self.control.relocation_disabled is not None),
        }

    def snapshot(self) -> dict[str, Any]:
        """Metrics, configuration and policy version as plain data."""
        for name, value in self.pool_state().items():
            self.stats.set(name, value)
        by_utilization = self.occupancy.blocks_by_utilization(len(UTILIZATIONS)).tolist()
        for label, num_blocks in zip(UTILIZATIONS, by_utilization, strict=True):
            self.stats.set("blocks_by_utilization", num_blocks, label)
        return {
            "stats": self.stats.snapshot(),
            "config": self.config.to_dict(),
            "policy_version": self.policy_version,
        }
