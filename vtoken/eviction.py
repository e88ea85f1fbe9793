"""Eviction (paper Alg. 1, lines 2–3): who is due, how many tokens go, and freeing of blocks
that are left without any live token. All modes but ``off`` share this code, so ``naive`` and
``lazy`` take the same decisions.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vtoken.block_cap import full_at
from vtoken.config import VTokenConfig
from vtoken.documents import Document, Documents
from vtoken.eviction_choice import (
    first_eviction_at,
    target_live_tokens,
    usable_signals,
    what_may_go,
)
from vtoken.live_index import LiveIndex
from vtoken.observation import RequestSignals
from vtoken.occupancy import GIVEN_BACK, BlockOccupancy
from vtoken.policies.base import EvictionPolicy, checked_victims
from vtoken.policies.ranks import RankPolicy, RankQuestion, checked_ranks
from vtoken.policies.registry import policy_for
from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RequestKV
from vtoken.stats import VTokenStats
from vtoken.table_store import GROUP
from vtoken.types import IdArray

logger = logging.getLogger(__name__)

EvictionListener = Callable[[RequestKV, int, IdArray], None]
"""Called with the request, its logical length and the victims, after they were marked dead."""


class Due(NamedTuple):
    """A request of which tokens were computed.

    Attributes:
        kv: the request.
        num_computed: tokens whose K/V exists; later ones cannot be victims.
        signals: what was observed; a policy that needs more than it gets evicts nothing, and the
            eviction is postponed.
    """

    kv: RequestKV
    num_computed: int
    signals: RequestSignals | None = None


class Victims(NamedTuple):
    """Tokens that a request loses.

    Attributes:
        kv, num_computed: as in :class:`Due`.
        policy: whose choice they are.
        token_ids: ``[n]`` ascending.
        columns: ``[n]`` how many live tokens come before each: its column in the worker's row.
    """

    kv: RequestKV
    num_computed: int
    policy: EvictionPolicy
    token_ids: IdArray
    columns: IdArray


class Evictor:
    """Applies policy and budget, the service's or the request's own, to every request.

    The service's can change between steps; a request's own never do.
    """

    def __init__(
        self,
        config: VTokenConfig,
        pool: BlockPoolPort,
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        """Start with the document that ``config`` is.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        self._pool = pool
        self._occupancy = occupancy
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

    def evict_due(self, step: Iterable[Due]) -> list[Due]:
        """Bring those of these requests down to their budget whose eviction is due.

        What becomes of a request does not depend on the others, unless ``evict_free_ratio`` makes
        it depend on the pool.

        Args:
            step: requests; their tables and blocks change.

        Returns:
            Which were due and are through, with or without victims.
        """
        step = list(step)
        if all(d.config.evict_free_ratio >= 1 for d in self.documents.in_use()):
            return self._evict_together(step)
        # Whether one must evict depends on how much the ones before it freed.
        return [through for due in step for through in self._evict_together([due])]

    def _evict_together(self, step: Sequence[Due]) -> list[Due]:
        """Evict from those that are due; those that miss observations are postponed."""
        store = self._occupancy.store
        rows = np.array([due.kv.row for due in step], np.int64)
        computed = np.array([due.num_computed for due in step], np.int64)
        is_long_enough = (computed >= store.next_evict_at[rows]).tolist()
        through: list[Due] = []
        victims: list[Victims] = []
        by_rank: defaultdict[tuple[RankPolicy, Document], list[tuple[Due, int]]] = defaultdict(list)
        num_live = store.num_live[rows].tolist()
        for due, due_at_all, live in zip(step, is_long_enough, num_live, strict=True):
            kv, document = due.kv, self.document_of(due.kv)
            config, policy = document.config, self.policy_of(kv, document)
            if not due_at_all or not self._may_evict_from(due, config):
                continue
            live -= kv.table.num_live_from(due.num_computed)
            excess = live - target_live_tokens(kv, config, due.num_computed)
            if excess > 0 and policy.evicts:
                # Where few tokens go, finding each is less work than listing all that live.
                few = excess * GROUP <= due.num_computed
                if few and isinstance(policy, RankPolicy) and not kv.options.protect:
                    by_rank[policy, document].append((due, excess))
                elif (found := self._one_by_one(due, policy)) is None:
                    self.postpone(kv, due.num_computed)
                    continue
                else:
                    victims.append(found)
            through.append(due)
        for (rank_policy, document), asked in by_rank.items():
            victims += self._by_rank(rank_policy, document.config, asked)
        self.evict(victims)
        for due in through:
            self._through(due)
        return through

    def _may_evict_from(self, due: Due, config: VTokenConfig) -> bool:
        if config.evict_free_ratio >= 1:
            return True
        # If the pool was ample when the step was scheduled, nobody asked for signals. The request
        # stays due and the next step asks.
        is_unasked = due.signals is None and self.wants_signals(due.kv, due.num_computed)
        return self.may_evict(config) and not is_unasked

    def _through(self, due: Due) -> None:
        """Its eviction is over, with or without victims."""
        config = self.document_of(due.kv).config
        if config.evict_free_ratio < 1:
            due.kv.last_signals = due.signals
        due.kv.next_evict_at = _next_due(due.kv, config, due.num_computed)

    def _one_by_one(self, due: Due, policy: EvictionPolicy) -> Victims | None:
        """What a policy takes that looks at each live token; None if it lacks observations."""
        live_ids = due.kv.table.live_ids(before=due.num_computed)
        found = self._select(due.kv, due.num_computed, live_ids, due.signals)
        if found is None:
            return None
        return Victims(due.kv, due.num_computed, policy, found, live_ids.searchsorted(found))

    def _by_rank(
        self, policy: RankPolicy, config: VTokenConfig, asked: Sequence[tuple[Due, int]]
    ) -> list[Victims]:
        """What a policy takes that does not, of all its requests at once.

        Args:
            policy, config: of these requests.
            asked: each with the number of live tokens above its target.
        """
        numbers = [(d.kv.row, d.num_computed, d.kv.request_seed, excess) for d, excess in asked]
        rows, lengths, seeds, excesses = np.array(numbers, np.int64).T
        index = LiveIndex(self._occupancy.store, rows)
        first, last = index.rank(
            np.tile(np.arange(len(rows)), 2),
            np.concatenate(
                [
                    np.minimum(config.sink_tokens, lengths),
                    np.maximum(lengths - config.recent_tokens, 0),
                ]
            ),
        ).reshape(2, -1)
        candidates = np.maximum(last - first, 0)
        question = RankQuestion(candidates, np.minimum(excesses, candidates), lengths, seeds)
        try:
            ranks = checked_ranks(policy, question)
        except Exception:
            self._policy_failed(policy, [due.kv for due, _ in asked])
            return []
        owner = np.arange(len(rows)).repeat(question.num_victims)
        columns = first[owner] + ranks
        token_ids = index.token(owner, columns)
        ends = question.num_victims.cumsum().tolist()
        return [
            Victims(due.kv, due.num_computed, policy, token_ids[start:end], columns[start:end])
            for (due, _), start, end in zip(asked, [0, *ends], ends, strict=False)
        ]

    def _policy_failed(self, policy: EvictionPolicy, requests: Sequence[RequestKV]) -> None:
        """A broken policy must not take the engine down: these requests keep their tokens."""
        names = ", ".join(kv.req_id for kv in requests)
        logger.exception("policy %r failed on request %s", policy.name, names)
        self._stats.inc("policy_errors_total", len(requests), policy.name)

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
        if kv.num_live <= self.target_of(kv, kv.num_tokens):
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
            columns = live_ids.searchsorted(victims)
            self.evict([Victims(kv, kv.num_tokens, policy, victims, columns)])
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
        seen = usable_signals(policy.signals, signals, live_ids)
        if seen is None:
            return None
        kv.window_missed = False
        choice = what_may_go(kv, policy, document.config, num_computed, seen, num_newer)
        if choice.num_victims <= 0:
            return live_ids[:0]
        try:
            return checked_victims(policy, *choice)
        except Exception:
            self._policy_failed(policy, [kv])
            return live_ids[:0]

    def evict(self, step: Sequence[Victims]) -> None:
        """Mark tokens of several requests dead, and give back the blocks that are left empty."""
        step = [victims for victims in step if len(victims.token_ids)]
        if not step:
            return
        rows = np.array([victims.kv.row for victims in step])
        counts = np.array([len(victims.token_ids) for victims in step])
        token_ids = np.concatenate([victims.token_ids for victims in step])
        slots = self._occupancy.store.mark_dead(rows, counts, token_ids)
        blocks = slots // self._occupancy.block_size
        whose, places = self._occupancy.remove_tokens(rows, counts, blocks)
        self._occupancy.store.row_changed[rows] = True
        num_evicted: Counter[str] = Counter()
        for kv, _, policy, ids, columns in step:
            if not kv.num_evicted:
                # What is computed from here on depends on the eviction: never share it.
                self._pool.stop_caching(kv.req_id)
            kv.num_evicted += len(ids)
            kv.num_evictions += 1
            kv.drop_columns(columns)
            num_evicted[policy.name] += len(ids)
        for name, num in num_evicted.items():
            self._stats.inc("evicted_tokens_total", num, name)
        emptied = set(whose.tolist())
        for i, victims in enumerate(step):
            if i in emptied or victims.kv.left_empty is not None:
                self._free_emptied(victims, places[whose == i])
        if self.listener is not None:
            for victims in step:
                self.listener(victims.kv, victims.num_computed, victims.token_ids)

    def _free_emptied(self, victims: Victims, places: IdArray) -> None:
        """Give back blocks that lost their last live token, except sources in flight, and blocks
        that are not closed: these are looked at again at the next eviction."""
        kv = victims.kv
        if kv.left_empty is not None:
            places = np.union1d(places, kv.left_empty)
            still = (kv.blocks.num_live[places] == 0) & (kv.blocks.ids[places] != GIVEN_BACK)
            places = places[still]
        closed = places < victims.num_computed // kv.block_size
        empty = places[closed]
        kv.left_empty = None if len(empty) == len(places) else places[~closed]
        if kv.plan is not None:
            empty = np.setdiff1d(empty, kv.plan.source_indices, assume_unique=True)
        if not len(empty):
            return
        kv.give_back(empty, self._pool)
        self._stats.inc("freed_blocks_total", len(empty), "empty")


def _next_due(kv: RequestKV, config: VTokenConfig, num_computed: int) -> int:
    """After one interval, or, under a cap, when the request will have filled its blocks."""
    cap = config.max_blocks_per_request
    if cap is None:
        return num_computed + config.evict_interval_tokens
    closed = kv.table.live_ids(before=num_computed - num_computed % kv.block_size)
    return full_at(num_computed, len(closed), cap, kv.block_size)
