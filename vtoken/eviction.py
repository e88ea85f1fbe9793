"""Eviction (paper Alg. 1, lines 2–3): who is due, how many tokens go, and freeing of blocks
that are left without any live token. All modes but ``off`` share this code, so ``naive`` and
``lazy`` take the same decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vtoken.block_cap import capped_target, full_at
from vtoken.config import VTokenConfig
from vtoken.documents import Document, Documents
from vtoken.observation import ATTENTION_SIGNALS, DECODE_SIGNALS, RequestSignals
from vtoken.policies.base import (
    EvictionPolicy,
    LiveView,
    checked_victims,
    protect_partial_pages,
    protect_spans,
    protected_tokens,
)
from vtoken.policies.registry import policy_for
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RequestKV
from vtoken.stats import VTokenStats
from vtoken.types import BoolArray, IdArray

logger = logging.getLogger(__name__)

EvictionListener = Callable[[RequestKV, int, IdArray], None]
"""Called with the request, its logical length and the victims, after they were marked dead."""


class Evictor:
    """Applies policy and budget, the service's or the request's own, to every request.

    The service's can change between steps; a request's own never do.
    """

    def __init__(self, config: VTokenConfig, pool: BlockPoolPort, stats: VTokenStats) -> None:
        """Start with the document that ``config`` is.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        self._pool = pool
        self._stats = stats
        self.listener: EvictionListener | None = None
        self.documents = Documents(config)
        self._show_policy()

    def install(self, document: Document, *, for_new_only: bool = False) -> None:
        """Use another document from the next eviction on; see :meth:`Documents.install`."""
        self.documents.install(document, for_new_only=for_new_only)
        self._show_policy()

    def _show_policy(self) -> None:
        name = self.documents.current.config.policy
        self._stats.inc("evicted_tokens_total", 0, name)
        self._stats.inc("evictions_postponed_total", 0, name)

    @property
    def policy(self) -> EvictionPolicy:
        """The service's, in force for new requests."""
        return self.documents.current.policy

    def document_of(self, kv: RequestKV) -> Document:
        """The policy document that the request follows where it has no options of its own."""
        return self.documents.of(kv.generation)

    def policy_of(self, kv: RequestKV, document: Document | None = None) -> EvictionPolicy:
        """The request's own policy, or the service's (under ``document`` instead of its own)."""
        document = document or self.document_of(kv)
        key = kv.options.policy_key
        return document.policy if key is None else policy_for(*key, document.config.seed)

    def target_of(self, kv: RequestKV, num_tokens: int) -> int:
        """Live tokens that the request may keep, by its own budget or the service's."""
        return target_live_tokens(kv, self.document_of(kv).config, num_tokens)

    def may_evict(self, config: VTokenConfig) -> bool:
        """Whether the pool is as full as ``evict_free_ratio`` asks for; pure."""
        ratio = config.evict_free_ratio
        return ratio >= 1 or (self._pool.num_free_blocks() <= ratio * self._pool.num_total_blocks)

    def wants_signals(self, kv: RequestKV, num_computed: int) -> bool:
        """Whether an eviction at this length would need signals; pure."""
        return (
            bool(self.policy_of(kv).signals)
            and num_computed >= kv.next_evict_at
            and self.may_evict(self.document_of(kv).config)
            and kv.table.num_live > self.target_of(kv, num_computed)
        )

    def postpone(self, kv: RequestKV, num_computed: int) -> None:
        """Put the request's next eviction off by one interval, for want of observations."""
        interval = self.document_of(kv).config.evict_interval_tokens
        kv.next_evict_at = num_computed + interval
        self._stats.inc("evictions_postponed_total", 1, self.policy_of(kv).name)

    def evict_if_due(
        self, kv: RequestKV, num_computed: int, signals: RequestSignals | None = None
    ) -> bool:
        """Bring the request down to its budget if an eviction is due.

        Args:
            kv: the request; its table and blocks change.
            num_computed: tokens whose K/V exists; later ones cannot be victims.
            signals: what was observed; a policy that needs more than it gets evicts nothing,
                and the eviction is postponed.

        Returns:
            Whether it was due and is through, with or without victims.
        """
        config = self.document_of(kv).config
        if num_computed < kv.next_evict_at or not self.may_evict(config):
            return False
        may_be_unasked = signals is None and config.evict_free_ratio < 1
        if may_be_unasked and self.wants_signals(kv, num_computed):
            # The pool was ample when the step was scheduled, so nobody asked for signals. The
            # request stays due and the next step asks.
            return False
        if self.policy_of(kv).evicts:
            live_ids = kv.table.live_ids(before=num_computed)
            victims = self._select(kv, num_computed, live_ids, signals)
            if victims is None:
                self.postpone(kv, num_computed)
                return False
            if len(victims):
                self._evict(kv, num_computed, live_ids, victims)
        if config.evict_free_ratio < 1:
            kv.last_signals = signals
        kv.next_evict_at = _next_due(kv, config, num_computed)
        return True

    def evict_early(self, kv: RequestKV) -> None:
        """Bring a request down to its budget before it is due, rather than preempt somebody.

        Only where outputs depend on the load anyway. A policy that needs signals goes by those of
        the request's last eviction: between two steps no others are at hand. Tokens that came
        later stay, and a request without any stays as it is.
        """
        config, policy = self.document_of(kv).config, self.policy_of(kv)
        if config.evict_free_ratio >= 1 or not policy.evicts:
            return
        if kv.num_tokens < first_eviction_at(config, kv.prefill_end):
            return
        live_ids = kv.table.live_ids()
        if not policy.signals:
            victims = self._select(kv, kv.num_tokens, live_ids, None)
        elif kv.last_signals is not None:
            known = kv.last_signals.of_survivors(live_ids)
            num_newer = len(live_ids) - len(known.token_ids)
            victims = self._select(kv, kv.num_tokens, known.token_ids, known, num_newer)
        else:
            return
        if victims is not None and len(victims):
            self._evict(kv, kv.num_tokens, live_ids, victims)
            kv.next_evict_at = _next_due(kv, config, kv.num_tokens)

    def _select(
        self,
        kv: RequestKV,
        num_computed: int,
        live_ids: IdArray,
        signals: RequestSignals | None,
        num_newer: int = 0,
    ) -> IdArray | None:
        """Victims out of ``live_ids``, maybe none; None if the policy lacks observations.

        ``num_newer`` further tokens are live and count against the budget, but cannot go.
        """
        document = self.document_of(kv)
        policy = self.policy_of(kv, document)
        if len(live_ids) + num_newer <= self.target_of(kv, num_computed):
            return live_ids[:0]
        seen = _usable(policy.signals, signals, live_ids)
        if seen is None:
            return None
        kv.window_missed = False
        choice = what_may_go(kv, policy, document.config, num_computed, seen, num_newer)
        if choice.num_victims <= 0:
            return live_ids[:0]
        try:
            return checked_victims(policy, *choice)
        except Exception:
            # A broken policy must not take the engine down; the request keeps its tokens.
            logger.exception("policy %r failed on request %s", policy.name, kv.req_id)
            self._stats.inc("policy_errors_total", 1, policy.name)
            return live_ids[:0]

    def _evict(self, kv: RequestKV, num_computed: int, live_ids: IdArray, victims: IdArray) -> None:
        if not kv.num_evicted:
            # What is computed from here on depends on the eviction: never share it.
            self._pool.stop_caching(kv.req_id)
        if kv.row_ids is None:
            # With tokens in flight, of which some may have gone early.
            kv.row_ids = live_ids if num_computed == kv.num_tokens else kv.table.live_ids()
        kv.blocks.remove_tokens(kv.table.evict_tokens(victims))
        kv.num_evicted += len(victims)
        kv.num_evictions += 1
        kv.row_stale = True
        self._stats.inc("evicted_tokens_total", len(victims), self.policy_of(kv).name)
        self.free_empty_blocks(kv, num_computed)
        if self.listener is not None:
            self.listener(kv, num_computed, victims)

    def free_empty_blocks(self, kv: RequestKV, num_computed: int) -> None:
        """Give back blocks without live token, except the tail block and sources in flight."""
        empty = kv.blocks.empty_indices(num_computed // kv.table.block_size)
        if kv.plan is not None:
            empty = np.setdiff1d(empty, kv.plan.source_indices, assume_unique=True)
        if not len(empty):
            return
        kv.give_back(empty, self._pool)
        self._stats.inc("freed_blocks_total", len(empty), "empty")


class Choice(NamedTuple):
    """What a policy is asked for one eviction; see :meth:`EvictionPolicy.select_victims`."""

    view: LiveView
    num_victims: int
    protected: BoolArray


def first_eviction_at(config: VTokenConfig, prefill_end: int) -> int:
    """Logical length from which a request may lose tokens."""
    return 0 if config.evict_during_prefill else prefill_end


def target_live_tokens(kv: RequestKV, config: VTokenConfig, num_tokens: int) -> int:
    """Live tokens that the request may keep, by its own budget or that of ``config``, below the
    cap of blocks if there is one; pure."""
    target = kv.options.target_live_tokens(config, num_tokens)
    cap = config.max_blocks_per_request
    return target if cap is None else capped_target(target, cap, kv.block_size)


def _next_due(kv: RequestKV, config: VTokenConfig, num_computed: int) -> int:
    """After one interval, or, under a cap, when the request will have filled its blocks."""
    cap = config.max_blocks_per_request
    if cap is None:
        return num_computed + config.evict_interval_tokens
    closed = kv.table.live_ids(before=num_computed - num_computed % kv.block_size)
    return full_at(num_computed, len(closed), cap, kv.block_size)


def what_may_go(
    kv: RequestKV,
    policy: EvictionPolicy,
    config: VTokenConfig,
    num_computed: int,
    seen: RequestSignals,
    num_newer: int = 0,
) -> Choice:
    """How many tokens a request over its budget must lose, and which it may lose; pure.

    Args:
        kv: the request.
        policy: of the request.
        config: budget and protection, where the request has none of its own.
        num_computed: tokens whose K/V exists.
        seen: its live tokens below ``num_computed``, with the signals of ``policy``.
        num_newer: live tokens below ``num_computed`` that are not among them, and cannot go.
    """
    live_ids = seen.token_ids
    excess = len(live_ids) + num_newer - target_live_tokens(kv, config, num_computed)
    view = LiveView(
        live_ids,
        num_computed,
        kv.num_prompt_tokens,
        kv.request_seed,
        seen.values,
        kv.block_size,
    )
    protected = protected_tokens(view, config.sink_tokens, config.recent_tokens)
    protect_spans(view, kv.options.protect, protected)
    _protect_unseen(policy, kv, seen, protected)  # they must not die first
    if policy.whole_pages:
        protected = protect_partial_pages(view, protected)
        excess -= excess % view.page_size
    num_victims = min(excess, len(live_ids) - int(np.count_nonzero(protected)))
    return Choice(view, num_victims, protected)


def _protect_unseen(
    policy: EvictionPolicy, kv: RequestKV, seen: RequestSignals, protected: BoolArray
) -> None:
    """Mark live tokens that an observation was due for and that none has seen yet."""
    unseen = slice(seen.num_observed, None)
    if policy.signals & DECODE_SIGNALS:
        protected[unseen] = True
    else:  # generated tokens are not observed at all
        protected[unseen] |= seen.token_ids[unseen] < kv.prefill_end


def _usable(
    needed: frozenset[str], signals: RequestSignals | None, live_ids: IdArray
) -> RequestSignals | None:
    """What the policy declared, for exactly these tokens; None if that was not observed."""
    if not needed:
        return RequestSignals(live_ids, len(live_ids))
    aligned = None if signals is None else signals.aligned(live_ids)
    if aligned is None or not needed <= aligned.values.keys():
        return None
    if needed & ATTENTION_SIGNALS and not aligned.num_observed:
        return None
    return RequestSignals(
        live_ids, aligned.num_observed, {name: aligned.values[name] for name in needed}
    )
