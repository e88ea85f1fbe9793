"""An engine around the token layer, with a scheduler, a worker and K/V content, all simulated.

The scheduler runs up to :data:`MAX_IN_FLIGHT` steps ahead of the outputs it has processed, as
under async scheduling. The worker executes steps in order. Memory is an array from slot to a
number that identifies the content that was computed there, so a wrong mapping is a wrong number:

    clean      base of the prefix family (shared prompt) or of the request, plus the token id
    tainted    computed after an eviction: a base that no other life of any request has

After every call that changes the layer, :meth:`EngineModel.check` compares everything.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.core_models import ModelPool, NaiveModel, NaiveRequest, make_config, make_signals
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.history import ChangeInfo
from vtoken.observation import ATTENTION_SIGNALS, DECODE_SIGNALS, RequestSignals
from vtoken.policies.base import EvictionPolicy
from vtoken.policies.registry import POLICIES
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.request_options import NO_OPTIONS, RequestOptions
from vtoken.token_layer import TokenLayer

MAX_IN_FLIGHT = 3
MAX_REQUESTS = 6
_SPAN = 1 << 20

Report = tuple[int, str | None, tuple[str, ...]]
"""Ticket, error, and requests whose digests differ."""


@dataclass(eq=False)
class Request:
    """A request as the scheduler sees it; survives preemption.

    Attributes:
        generation: in which it arrived.
        document: what it keeps of earlier policy documents; None: it follows the one in force.
    """

    req_id: str
    base: int
    family: int
    num_shared: int
    num_prompt: int
    max_tokens: int
    prefill_end: int
    options: RequestOptions = NO_OPTIONS
    generation: int = 0
    document: VTokenConfig | None = None
    computed: int = 0
    done: int = 0

    def clean_key(self, token: int) -> int:
        """Content of a token that was computed with every earlier token live."""
        return (self.family if token < self.num_shared else self.base) * _SPAN + token

    def block_hashes(self, num_tokens: int, size: int) -> list[Hashable]:
        """Prefix-cache keys of its full blocks below ``num_tokens``."""
        full = range(num_tokens // size)
        return [(self.family if (i + 1) * size <= self.num_shared else self.base, i) for i in full]


@dataclass(eq=False)
class Entry:
    """One request in one step: what the worker is told and what it must find."""

    request: Request
    naive: NaiveRequest
    after: int
    row: list[int] | None
    dropped: list[int]
    signals: RequestSignals | None
    write_slots: list[int]
    write_keys: list[int]
    read_keys: list[int]


@dataclass(eq=False)
class Step:
    """A step on its way to the worker."""

    entries: list[Entry]
    plans: list[RelocationPlan]
    urgent: list[RelocationPlan]


@dataclass(eq=False)
class Output:
    """A step's result on its way back, with the reports of copies that ended before it."""

    entries: list[Entry]
    reports: list[Report]


@dataclass(eq=False)
class PendingCopy:
    """A batch that the copy engine has taken and may carry out at any time.

    Attributes:
        fails: half of it is copied, and that is reported.
        damaged: with whose bytes it goes wrong while it reports success; the digests tell.
        num_right: moves that are carried out right.
    """

    ticket: int
    src: np.ndarray
    dst: np.ndarray
    fails: bool
    damaged: tuple[str, ...]
    num_right: int

    @classmethod
    def of(cls, plans: list[RelocationPlan], fate: str) -> PendingCopy:
        """All moves of plans with one ticket; ``fate`` is right, fails or damaged (the last
        plan's bytes)."""
        src = np.concatenate([plan.moves.src_slots for plan in plans])
        dst = np.concatenate([plan.moves.dst_slots for plan in plans])
        assert not np.intersect1d(src, dst).size
        last = plans[-1].moves.num_moves
        is_damaged = fate == "damaged" and last > 0
        damaged = (plans[-1].req_id,) if is_damaged else ()
        right = len(src) // 2 if fate == "fails" else len(src) - last * is_damaged
        return cls(plans[0].ticket, src, dst, fate == "fails", damaged, right)


@dataclass
class Counts:
    """What happened, to prove that a run was not idle."""

    operations: int = 0
    evicted: int = 0
    committed: int = 0
    failed: int = 0
    rolled_back: int = 0
    preempted: int = 0
    aborted: int = 0
    finished: int = 0
    cache_hits: int = 0
    patches: int = 0
    late_evictions: int = 0
    urgent: int = 0
    early: int = 0
    lost: int = 0
    lost_bytes: int = 0
    postponed: int = 0
    mid_prefill: int = 0
    early_evictions: int = 0
    early_by_score: int = 0
    abandoned: int = 0
    held: int = 0
    shared: int = 0
    packed: int = 0
    own_document: int = 0
    own_policy: int = 0
    own_budget: int = 0
    own_spans: int = 0
    opted_out: int = 0


@dataclass(eq=False)
class EngineModel:
    """Drives a :class:`TokenLayer`; every public method is one thing that can happen.

    Attributes:
        prompt_tokens, shared_tokens: what is drawn for arrivals: the range of prompt lengths,
            and how many of them the request has in common with its family.
        options_ratio: share of arrivals with options of their own.
        skip_copies: mutant: the worker reports copies that it never made.
        urgent_late: mutant: urgent copies wait until the step has written.
    """

    config: dict[str, Any]
    num_blocks: int = 36
    block_size: int = 4
    prompt_tokens: tuple[int, int] = (1, 40)
    shared_tokens: tuple[int, ...] = (0, 0, 9, 24)
    options_ratio: float = 0.3
    skip_copies: bool = False
    urgent_late: bool = False
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.pool = ModelPool(self.num_blocks, self.block_size)
        self.layer = TokenLayer(make_config(**self.config), self.pool)
        self.layer.evictor.listener = self._on_eviction
        self.naive = NaiveModel(self.block_size)
        self.memory = np.full((self.num_blocks + 1) * self.block_size, -1, np.int64)
        self.worker_rows: dict[str, list[int]] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.steps: deque[Step] = deque()
        self.outputs: deque[Output] = deque()
        self.pending: PendingCopy | None = None
        self.reports: list[Report] = []
        self.in_flight: dict[int, list[tuple[NaiveRequest | None, RelocationPlan]]] = {}
        self.unproven: dict[int, list[tuple[str, NaiveRequest]]] = {}
        # Copies that happened and are not settled: whose bytes went wrong, None for all.
        self.failed_tickets: dict[int, tuple[str, ...] | None] = {}
        # Slots that a committed copy has still to fill, with the last such copy's ticket: a slot
        # may be filled, emptied and filled again by plans of one step.
        self.uncopied: dict[int, int] = {}
        self.eviction_log: list[tuple[str, int, list[int]]] = []
        self._victims: list[int] | None = None
        self._early: list[tuple[str, int, list[int]]] | None = None
        self._next_id = 0
        self._next_base = 1000  # below: prefix families

    # -- scheduler -------------------------------------------------------------------------

    def add_request(
        self,
        num_prompt: int,
        num_output: int,
        family: int,
        num_shared: int,
        options: Mapping[str, Any] | None = None,
        base: int | None = None,
    ) -> None:
        """A client sends a request whose first ``num_shared`` tokens belong to ``family``, with
        its own ``vtoken_*`` options; ``base`` of an earlier one repeats the rest of its prompt."""
        if len(self.running) + len(self.waiting) >= MAX_REQUESTS:
            return
        self._next_id += 1
        self.waiting.append(
            Request(
                req_id=f"r{self._next_id}",
                base=base or self._new_base(),
                family=family,
                num_shared=min(num_shared, num_prompt),
                num_prompt=num_prompt,
                max_tokens=num_prompt + num_output,
                prefill_end=num_prompt,
                options=RequestOptions.parse(options),
                generation=self.layer.evictor.documents.generation,
            )
        )

    def schedule(self, chunk: int, skip: int, num_admit: int) -> None:
        """One engine step: at most ``chunk`` tokens each; running request ``skip`` is left out."""
        if len(self.steps) + len(self.outputs) >= MAX_IN_FLIGHT:
            return
        scheduled: dict[str, tuple[Request, int]] = {}
        for i, request in enumerate(list(self.running)):
            num_new = self._num_new(request, chunk)
            if i == skip or request not in self.running or not num_new:
                continue
            if self._make_room(request, num_new, scheduled):
                scheduled[request.req_id] = (request, num_new)
        for _ in range(num_admit):
            if self.waiting and self._start(self.waiting[0], chunk):
                request = self.waiting.popleft()
                self.running.append(request)
                scheduled[request.req_id] = (request, self._num_new(request, chunk))
        entries, computed = [], []
        for request, num_new in scheduled.values():
            computed.append((request, request.computed))
            entries.append(self._schedule_tokens(request, num_new))
        plans = self._plan(computed)
        self.steps.append(Step(entries, plans, self.layer.reclamation.take_urgent()))

    def process_output(self) -> None:
        """The scheduler receives the oldest output: settle, then evict, then finish."""
        if not self.outputs:
            return
        output = self.outputs.popleft()
        for report in output.reports:
            self._settle(*report)
        for entry in output.entries:
            request = entry.request
            if self.naive.requests.get(request.req_id) is not entry.naive:
                continue  # finished, aborted or preempted meanwhile
            request.done = entry.after
            self._evict(request, entry.naive, entry.signals)
            if request.done >= request.max_tokens:
                self._forget(request)
                self.counts.finished += 1

    def abort(self, index: int) -> None:
        """A client leaves."""
        everyone = [*self.running, *self.waiting]
        if not everyone:
            return
        request = everyone[index % len(everyone)]
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.counts.aborted += 1
        self._forget(request)

    def abandon(self) -> None:
        """An operator resets the prefix cache, which needs every block back at once."""
        self.layer.abandon_relocations()
        for ticket, plans in self.in_flight.items():
            self.in_flight[ticket] = []
            for naive, plan in plans:
                self.counts.rolled_back += 1
                self.counts.abandoned += 1
                if naive is not None:
                    naive.settle(plan.source_indices.tolist(), [], {})
        assert not self.layer.reclamation.num_in_flight
        self.check()

    def preempt(self, index: int) -> None:
        """The scheduler takes all blocks of a running request, which waits to be computed anew."""
        if not self.running:
            return
        request = self.running[index % len(self.running)]
        self._forget(request)
        self.counts.preempted += 1
        request.computed = 0
        request.prefill_end = max(request.num_prompt, request.done)
        request.done = 0
        self.waiting.appendleft(request)

    def patch(self, changes: Mapping[str, Any], *, for_new_only: bool = False) -> None:
        """A live change of the configuration, which may be refused."""
        before, version = self.layer.config, self.layer.policy_version
        policies = {r: self._policy_of(naive) for r, naive in self.naive.requests.items()}
        try:
            info = ChangeInfo(apply_to="new" if for_new_only else "running")
            self.layer.control.patch(changes, info)
        except ConfigError:
            assert self.layer.config is before
            assert self.layer.policy_version == version
        else:
            for request in [*self.running, *self.waiting]:
                request.document = (request.document or before) if for_new_only else None
                if naive := self.naive.requests.get(request.req_id):
                    naive.document = request.document
                    if not for_new_only:
                        self._follow(naive, policies[request.req_id])
            generations = {r.generation for r in [*self.running, *self.waiting]}
            self.layer.control.release_documents(generations)
            assert self.layer.policy_version == version + 1
            self.counts.patches += 1
        self.check()

    def _follow(self, naive: NaiveRequest, before: type[EvictionPolicy]) -> None:
        """What a document that is new to the request does to its next eviction."""
        if naive.options.policy_key is not None and naive.options.has_own_budget:
            return
        naive.next_due = self._first_due(naive)
        missing = (self._policy_of(naive).signals - before.signals) & ATTENTION_SIGNALS
        if missing and len(naive.key) >= naive.prefill_end:
            naive.next_due = len(naive.key) + self._document(naive).evict_interval_tokens

    # -- worker ----------------------------------------------------------------------------

    def execute(self, copy_fate: str = "right", hold_reports: bool = False) -> None:
        """The worker runs the oldest step: copies, rows, write, read, start new copies."""
        if not self.steps:
            return
        step = self.steps.popleft()
        self.copy()
        urgent = [PendingCopy.of([plan], copy_fate) for plan in step.urgent]
        for batch in urgent if not self.urgent_late else []:
            self._carry_out(batch)
        for entry in step.entries:
            if entry.row is not None:
                self.worker_rows[entry.request.req_id] = list(entry.row)
            else:
                for column in reversed(entry.dropped):
                    del self.worker_rows[entry.request.req_id][column]
            self.worker_rows[entry.request.req_id].extend(entry.write_slots)
            self.memory[entry.write_slots] = entry.write_keys
            entry.naive.executed = entry.after
        for batch in urgent if self.urgent_late else []:
            self._carry_out(batch)
        for entry in step.entries:
            found = self.memory[self.worker_rows[entry.request.req_id]].tolist()
            if entry.naive.poisoned:
                continue
            assert found == entry.read_keys, f"{entry.request.req_id} reads wrong content"
        if step.plans:
            self.pending = PendingCopy.of(step.plans, copy_fate)
        self.outputs.append(Output(step.entries, [] if hold_reports else self._take_reports()))

    def copy(self) -> None:
        """The copies of the batch in the worker's hands happen now."""
        copy, self.pending = self.pending, None
        if copy is not None:
            self._carry_out(copy)

    def _carry_out(self, copy: PendingCopy) -> None:
        end = copy.num_right
        if not self.skip_copies:
            self.memory[copy.dst[:end]] = self.memory[copy.src[:end]]
        for req_id, naive in self.unproven.get(copy.ticket, []):
            naive.poisoned |= copy.fails or req_id in copy.damaged
        self.failed_tickets[copy.ticket] = None if copy.fails else copy.damaged
        for slot in copy.dst.tolist():
            if self.uncopied.get(slot) == copy.ticket:
                del self.uncopied[slot]
        self.reports.append((copy.ticket, "boom" if copy.fails else None, copy.damaged))

    def drain(self) -> None:
        """Everything ends; nothing may be left."""
        while self.steps or self.outputs:
            self.execute()
            self.process_output()
        for request in list(self.running):
            self._forget(request)
        self.waiting.clear()
        self.copy()
        for report in self._take_reports():
            self._settle(*report)
        assert not self.layer.requests
        assert self.layer.reclamation.num_in_flight == 0
        assert self.pool.num_free_blocks() == self.num_blocks
        assert self.layer.occupancy.retained_blocks == 0
        assert self.layer.occupancy.live_tokens == 0
        self._check_stats()

    # -- the comparison --------------------------------------------------------------------

    def check(self) -> None:
        """Invariants, tables against the naive model, pool, and content of every live token."""
        self.counts.operations += 1
        self.layer.verification.check_all()
        self.naive.check(self.layer.requests, self.layer.occupancy)
        destinations = [
            block
            for plans in self.in_flight.values()
            for _, plan in plans
            for block in plan.dst_blocks.tolist()
        ]
        assert self.layer.reclamation.blocks_in_flight() == len(destinations)
        self.pool.check_integrity(destinations)
        for req_id, naive in self.naive.requests.items():
            blocks = self.pool.lists[req_id]
            assert blocks[: len(naive.blocks)] == naive.blocks
            if naive.poisoned:
                continue
            tokens = [
                token
                for token, slot in naive.slot.items()
                if token < naive.executed and slot not in self.uncopied
            ]
            found = self.memory[[naive.slot[token] for token in tokens]].tolist()
            assert found == [naive.key[token] for token in tokens], f"{req_id}: wrong content"

    def _check_stats(self) -> None:
        stats, counts = self.layer.stats, self.counts
        evicted = sum(v for _, v in stats.snapshot()["counters"]["evicted_tokens_total"])
        assert evicted == counts.evicted
        for outcome in ("committed", "failed", "rolled_back"):
            assert stats.counter("relocations_total", outcome) == getattr(counts, outcome)
        assert stats.counter("urgent_relocations_total") == counts.urgent
        rows = stats.snapshot()["counters"]["evictions_postponed_total"]
        assert sum(value for _, value in rows) >= counts.postponed

    # -- parts of a step -------------------------------------------------------------------

    def _new_base(self) -> int:
        self._next_base += 1
        return self._next_base

    def _num_new(self, request: Request, chunk: int) -> int:
        if request.computed < request.prefill_end:
            return min(chunk, request.prefill_end - request.computed)
        return int(request.computed < request.max_tokens)

    def _make_room(
        self, request: Request, num_new: int, scheduled: dict[str, tuple[Request, int]]
    ) -> bool:
        """Allocate; pack at once while there is no room, then preempt the newest requests."""
        while not self.pool.grow(request.req_id, request.computed + num_new):
            self.layer.reclamation.reservations.note_shortage()
            if self._reclaim_now(scheduled):
                continue
            victim = self.running[-1]
            scheduled.pop(victim.req_id, None)
            self.preempt(len(self.running) - 1)
            if victim is request:
                return False
        self._publish(request, request.computed + num_new)
        return True

    def _start(self, request: Request, chunk: int) -> bool:
        """Give a waiting request its blocks, as far as possible from the prefix cache."""
        reusable = request.prefill_end - 1  # the last token is always computed
        hashes = request.block_hashes(reusable, self.block_size)
        num_cached = self.pool.start_request(request.req_id, hashes)
        request.computed = num_cached * self.block_size
        if not self.pool.grow(request.req_id, request.computed + self._num_new(request, chunk)):
            self.pool.release(request.req_id)
            self.layer.reclamation.reservations.note_shortage()
            request.computed = 0
            return False
        self.counts.cache_hits += num_cached
        self._publish(request, request.computed + self._num_new(request, chunk))
        naive = NaiveRequest(
            self.block_size,
            request.prefill_end,
            next_due=0,
            options=request.options,
            num_prompt=request.num_prompt,
            document=request.document,
        )
        naive.next_due = self._first_due(naive)
        self.naive.requests[request.req_id] = naive
        self.layer.admit(
            request.req_id,
            request.num_prompt,
            request.prefill_end,
            request.base,
            request.options,
            request.generation,
            max_num_tokens=request.max_tokens,
        )
        self.check()
        return True

    def _publish(self, request: Request, num_tokens: int) -> None:
        self.pool.cache_full_blocks(
            request.req_id, request.block_hashes(num_tokens, self.block_size)
        )

    def _schedule_tokens(self, request: Request, num_new: int) -> Entry:
        before = request.computed
        after = request.computed = before + num_new
        kv, naive = self.layer.requests[request.req_id], self.naive.requests[request.req_id]
        change = self.layer.schedule_tokens(kv, before, after)
        slots, dropped = change or (None, None)
        blocks = self.pool.lists[request.req_id]
        gone = naive.dropped_columns()
        cached = range(len(naive.key), before)
        naive.grow(blocks, map(request.clean_key, cached))
        assert (slots is not None) == naive.dirty
        if slots is not None:
            assert slots.tolist() == list(naive.slot.values())
        assert ([] if dropped is None else dropped.tolist()) == gone
        naive.dirty = False
        if naive.num_evicted:
            base = self._new_base() * _SPAN
            keys = [base + token for token in range(before, after)]
        else:
            keys = [request.clean_key(token) for token in range(before, after)]
        naive.grow(blocks, keys)
        naive.row_tokens = list(naive.slot)
        self.check()
        return Entry(
            request=request,
            naive=naive,
            after=after,
            row=None if slots is None else slots.tolist(),
            dropped=gone,
            signals=self._signals(request, kv, after),
            write_slots=[naive.slot[token] for token in range(before, after)],
            write_keys=keys,
            read_keys=[naive.key[token] for token in naive.slot],
        )

    def _signals(self, request: Request, kv: RequestKV, after: int) -> RequestSignals | None:
        """What the worker would report after this step, if it is asked: made up, reproducible."""
        if not self.layer.wants_signals(kv, after):
            return None
        rng = np.random.default_rng([request.base, after])
        token_ids = kv.table.live_ids()
        num_observed = int(rng.choice([0, len(token_ids) // 2, *[len(token_ids)] * 4]))
        names = sorted(self._policy_of(request).signals)
        return make_signals(token_ids, names, rng, num_observed)

    def _reclaim_now(self, granted: Collection[str]) -> bool:
        """Relieve an allocation that failed; the layer may commit early or pack urgently."""
        free = self.pool.num_free_blocks()
        num_urgent = len(self.layer.reclamation._urgent)
        self._early = []
        relieved = self.layer.reclaim_now(granted)
        evicted_early, self._early = self._early, None
        assert relieved == (self.pool.num_free_blocks() > free)
        early = [
            (ticket, owner, plan)
            for ticket, plans in self.in_flight.items()
            for owner, plan in plans
            if owner is not None
        ]
        for ticket, naive, plan in early:
            self.in_flight[ticket].remove((naive, plan))
            self.counts.early += 1
            self._commit(naive, plan)
            self._await_proof(naive, plan)
        for req_id, num_tokens, victims in evicted_early:
            naive = self.naive.requests[req_id]
            assert self._may_evict_early(naive)
            assert num_tokens == len(naive.key) >= self._first_due(naive)
            self.counts.early_evictions += 1
            self.counts.early_by_score += bool(self._policy_of(naive).signals)
            assert set(victims) <= set(self._early_candidates(naive))
            self._evict_naive(naive, num_tokens, victims)
            naive.next_due = self._next_due(naive, num_tokens)
        if not relieved:
            self._check_budgets(granted)
        for plan in self.layer.reclamation._urgent[num_urgent:]:
            naive = self.naive.requests[plan.req_id]
            kv = self.layer.requests[plan.req_id]
            # An urgent plan has dropped its sources already.
            self._check_plan(plan, kv, naive, len(naive.key), Counter())
            self.counts.urgent += 1
            self._commit(naive, plan)
            self._await_proof(naive, plan)
        self.check()
        return relieved

    def _await_proof(self, naive: NaiveRequest, plan: RelocationPlan) -> None:
        """Committed before the copy was reported."""
        self.unproven.setdefault(plan.ticket, []).append((plan.req_id, naive))
        if plan.ticket in self.failed_tickets:  # it happened already, the report is on its way
            wrong = self.failed_tickets[plan.ticket]
            naive.poisoned |= wrong is None or plan.req_id in wrong
        elif not self._is_copied(plan.ticket):
            self.uncopied.update(dict.fromkeys(plan.moves.dst_slots.tolist(), plan.ticket))

    def _is_copied(self, ticket: int) -> bool:
        queued = {plan.ticket for step in self.steps for plan in step.plans}
        pending = {self.pending.ticket} if self.pending else set()
        urgent = {plan.ticket for plan in self.layer.reclamation._urgent}
        return ticket not in queued | pending | urgent

    def _holders(self, block: int) -> list[str]:
        return [req_id for req_id, blocks in self.pool.lists.items() if block in blocks]

    def _commit(self, naive: NaiveRequest, plan: RelocationPlan) -> None:
        moves = plan.moves
        where = dict(zip(moves.token_ids.tolist(), moves.dst_slots.tolist(), strict=True))
        naive.settle(plan.source_indices.tolist(), plan.dst_blocks.tolist(), where)

    def _plan(self, computed: list[tuple[Request, int]]) -> list[RelocationPlan]:
        free = self.pool.num_free_blocks()
        kvs = [(self.layer.requests[request.req_id], before) for request, before in computed]
        spares_cache = self._spares_cache()
        cached = dict(self.pool.hash_of_block)
        plans = self.layer.plan_relocations(kvs)
        assert not spares_cache or self.pool.hash_of_block == cached, "dropped a cached block"
        num_taken = 0
        letting_go = Counter(
            self.naive.requests[plan.req_id].blocks[place]
            for plan in plans
            for place in plan.source_indices.tolist()
        )
        gain = len(letting_go) - sum(len(plan.dst_blocks) for plan in plans)
        assert gain >= len({frozenset(self._holders(b)) for b in letting_go}), "no gain"
        self.counts.shared += any(num > 1 for num in letting_go.values())
        for plan in plans:
            kv, before = next(item for item in kvs if item[0].req_id == plan.req_id)
            naive = self.naive.requests[plan.req_id]
            self._check_plan(plan, kv, naive, before, letting_go)
            num_taken += len(plan.dst_blocks)
            naive.sources = frozenset(plan.source_indices.tolist())
            self.in_flight.setdefault(plan.ticket, []).append((naive, plan))
        assert len({plan.req_id for plan in plans}) == len(plans)
        assert self.pool.num_free_blocks() == free - num_taken
        self.check()
        return plans

    def _spares_cache(self) -> bool:
        """Whether the next plans may take only blocks without cached content."""
        if self.layer.config.relocate_into_cached or self.layer.reclamation.reservations._is_short:
            return False
        num_free, num_soon = self.pool.num_free_blocks(), 0
        for request in self.running:
            places = len(self.naive.requests[request.req_id].blocks)
            prompt = -(-request.prefill_end // self.block_size)
            most = -(-request.max_tokens // self.block_size)
            num_soon += min(max(1, prompt - places), most - places)
        return num_soon <= num_free

    def _check_plan(
        self,
        plan: RelocationPlan,
        kv: RequestKV,
        naive: NaiveRequest,
        before: int,
        letting_go: Counter[int],
    ) -> None:
        """I4, from scratch; ``letting_go``: how many plans of the batch empty each block."""
        places = plan.source_indices.tolist()
        sources = [naive.blocks[place] for place in places]
        assert not naive.sources, "a second plan for one request"
        capped = self._document(naive).max_blocks_per_request is not None
        assert capped or len(places) <= self.layer.config.max_source_blocks
        assert len(plan.dst_blocks) < len(places), "the plan frees nothing"
        assert max(places) < before // self.block_size, "the tail block moves"
        assert 0 not in sources
        # Shared blocks move only if every holder lets go in the same batch.
        assert all(self.pool.ref[block] == letting_go[block] for block in sources), "shared"
        tokens = [t for t, slot in naive.slot.items() if slot // self.block_size in sources]
        assert plan.moves.token_ids.tolist() == tokens
        assert plan.moves.src_slots.tolist() == [naive.slot[t] for t in tokens]
        gap_free = [
            block * self.block_size + offset
            for block in plan.dst_blocks.tolist()
            for offset in range(self.block_size)
        ]
        assert plan.moves.dst_slots.tolist() == gap_free[: len(tokens)]
        assert len(plan.dst_blocks) == -(-len(tokens) // self.block_size)

    def _settle(self, ticket: int, error: str | None, damaged: tuple[str, ...]) -> None:
        plans = self.in_flight.pop(ticket, [])
        unproven = self.unproven.pop(ticket, [])
        self.failed_tickets.pop(ticket, None)
        lost = self.layer.settle(ticket, error, damaged)
        current = [r for r, naive in unproven if self.naive.requests.get(r) is naive]
        assert lost == [r for r in current if error is not None or r in damaged]
        self.counts.lost_bytes += bool(lost and error is None)
        for req_id, _ in unproven:
            self._count_outcome(req_id, error, damaged)
        for naive, plan in plans:
            if naive is None:
                has_failed = error is not None or plan.req_id in damaged
                self.counts.failed += has_failed
                self.counts.rolled_back += not has_failed
                continue
            if self._count_outcome(plan.req_id, error, damaged):
                self._commit(naive, plan)
            else:
                naive.settle(plan.source_indices.tolist(), [], {})
        self.check()
        for req_id in lost:
            self.counts.lost += 1
            self._forget(next(r for r in self.running if r.req_id == req_id))

    def _count_outcome(self, req_id: str, error: str | None, damaged: tuple[str, ...]) -> bool:
        """Whether a plan of a reported batch has succeeded, committed early or not."""
        succeeded = error is None and req_id not in damaged
        self.counts.committed += succeeded
        self.counts.failed += not succeeded
        return succeeded

    def _evict(self, request: Request, naive: NaiveRequest, signals: RequestSignals | None) -> None:
        due = naive.next_due
        num_victims, candidates, is_through = self._expected_eviction(request, naive, signals)
        self._victims = None
        num_urgent = len(self.layer.reclamation._urgent)
        self.layer.evict_if_due(self.layer.requests[request.req_id], request.done, signals)
        victims = self._victims or []
        assert len(victims) == num_victims
        assert set(victims) <= set(candidates)
        if self._policy_of(naive).name == "streaming_llm":
            assert victims == candidates[:num_victims]
        if victims:
            self.counts.late_evictions += bool(naive.sources)
            self._count_options(naive.options)
            self.counts.own_document += naive.document not in (None, self.layer.config)
            self._evict_naive(naive, request.done, victims)
        self.counts.opted_out += due <= request.done and not naive.options.evict
        if is_through:
            naive.next_due = self._next_due(naive, request.done)
            if self._document(naive).evict_free_ratio < 1:
                naive.last_signals = signals
        self._follow_packing(request, naive, num_urgent, is_through)
        self.check()

    def _count_options(self, options: RequestOptions) -> None:
        self.counts.own_policy += options.policy_key is not None
        self.counts.own_budget += options.has_own_budget
        self.counts.own_spans += bool(options.protect)

    def _follow_packing(
        self, request: Request, naive: NaiveRequest, num_urgent: int, is_through: bool
    ) -> None:
        """Under a cap of blocks what is left is packed at once, and as tightly as it can be."""
        plans = self.layer.reclamation._urgent[num_urgent:]
        is_capped = self._document(naive).max_blocks_per_request is not None
        packs = is_capped and self.layer.config.relocates
        assert not plans or (packs and is_through)
        kv = self.layer.requests[request.req_id]
        for plan in plans:
            assert plan.req_id == request.req_id
            # Its sources may be destinations of the next plan already.
            sources = [naive.blocks[place] for place in plan.source_indices.tolist()]
            taken = Counter({block: self.pool.ref[block] for block in sources})
            self._check_plan(plan, kv, naive, request.done, taken)
            self.counts.packed += 1
            self._commit(naive, plan)
            self._await_proof(naive, plan)
        if packs and is_through and not naive.sources:
            live = naive.live_per_block()
            closed = naive.blocks[: request.done // self.block_size]
            private = [b for b in closed if b and self.pool.ref[b] == 1]
            loose = [live[b] for b in private if live[b] < self.block_size]
            needed = -(-sum(loose) // self.block_size)
            assert len(loose) <= needed or self.pool.num_free_blocks() < needed

    def _evict_naive(self, naive: NaiveRequest, num_tokens: int, victims: list[int]) -> None:
        self.counts.evicted += len(victims)
        self.counts.mid_prefill += num_tokens < naive.prefill_end
        naive.evict(victims, num_tokens)

    def _document(self, request: Request | NaiveRequest) -> VTokenConfig:
        """The one that the request keeps, or the one in force."""
        return request.document or self.layer.config

    def _first_due(self, naive: NaiveRequest) -> int:
        return 0 if self._document(naive).evict_during_prefill else naive.prefill_end

    def _policy_of(self, request: Request | NaiveRequest) -> type[EvictionPolicy]:
        """The class; the model reads declarations only, never a choice."""
        key = request.options.policy_key
        return POLICIES[self._document(request).policy if key is None else key[0]]

    def _target(self, naive: NaiveRequest, num_tokens: int) -> int:
        """Live tokens that the request may keep."""
        config, options = self._document(naive), naive.options
        ratio, budget = options.keep_ratio, options.budget_tokens
        if ratio is None and budget is None:
            ratio, budget = config.keep_ratio, config.budget_tokens
        target = budget if ratio is None else max(1, -int(-num_tokens * ratio // 1))
        assert target is not None
        if config.max_blocks_per_request is not None:
            target = min(target, (config.max_blocks_per_request - 1) * self.block_size)
        return target

    def _next_due(self, naive: NaiveRequest, num_tokens: int) -> int:
        """An interval later, or when the blocks of the cap will be full."""
        config, size = self._document(naive), self.block_size
        if config.max_blocks_per_request is None:
            return num_tokens + config.evict_interval_tokens
        due = num_tokens - num_tokens % size
        filled = -(-sum(token < due for token in naive.slot) // size)
        while True:
            due, filled = due + size, filled + 1
            if filled >= config.max_blocks_per_request:
                return due

    def _evictable(self, naive: NaiveRequest, num_tokens: int) -> list[int]:
        """Live tokens that nothing protects: sinks, recent ones, spans of the prompt."""
        config, prompt = self._document(naive), naive.num_prompt
        spans = naive.options.protect
        return [
            token
            for token in naive.slot
            if config.sink_tokens <= token < num_tokens - config.recent_tokens
            and not any(start <= token < min(end, prompt) for start, end in spans)
        ]

    def _is_tight(self, naive: NaiveRequest) -> bool:
        ratio = self._document(naive).evict_free_ratio
        return ratio == 1 or self.pool.num_free_blocks() <= ratio * self.num_blocks

    def _check_budgets(self, granted: Collection[str]) -> None:
        """No block became free: then nobody has a token left that might go early."""
        for req_id, naive in self.naive.requests.items():
            if not self._may_evict_early(naive):
                continue
            num_tokens = len(naive.key)
            if req_id in granted and len(naive.slot) == num_tokens:
                continue  # its blocks of this step are in the prefix cache already
            if num_tokens >= self._first_due(naive):
                candidates = self._early_candidates(naive)
                if self._policy_of(naive).whole_pages:
                    continue
                assert not candidates or len(naive.slot) <= self._target(naive, num_tokens)

    def _may_evict_early(self, naive: NaiveRequest) -> bool:
        return self._document(naive).evict_free_ratio < 1 and self._policy_of(naive).evicts

    def _early_candidates(self, naive: NaiveRequest) -> list[int]:
        """With a policy that needs signals, what the request's last eviction had signals of."""
        policy, last = self._policy_of(naive), naive.last_signals
        candidates = self._evictable(naive, len(naive.key))
        if not policy.signals:
            return candidates
        if last is None or not policy.signals <= last.values.keys():
            return []
        observed = set(last.token_ids[: last.num_observed].tolist())
        if policy.signals & ATTENTION_SIGNALS and not observed & set(naive.slot):
            return []
        blind = naive.prefill_end if not policy.signals & DECODE_SIGNALS else len(naive.key)
        known = set(last.token_ids.tolist())
        return [t for t in candidates if t in observed or (t in known and t >= blind)]

    def _expected_eviction(
        self, request: Request, naive: NaiveRequest, signals: RequestSignals | None
    ) -> tuple[int, list[int], bool]:
        """How many tokens must die now, which may, and whether the request is through then."""
        policy, config = self._policy_of(naive), self._document(naive)
        if request.done < naive.next_due:
            return 0, [], False
        if not self._is_tight(naive):
            self.counts.held += 1
            return 0, [], False
        over = len(naive.slot) > self._target(naive, request.done)
        if policy.signals and signals is None and config.evict_free_ratio < 1 and over:
            return 0, [], False  # nobody asked for signals: it stays due
        live = [token for token in naive.slot if token < request.done]
        candidates = self._evictable(naive, request.done)
        excess = len(live) - self._target(naive, request.done)
        if not policy.evicts or excess <= 0:
            return 0, candidates, True
        if policy.signals:
            if signals is None:
                observed: set[int] = set()
            else:
                observed = set(signals.token_ids[: signals.num_observed].tolist())
            attention = policy.signals & ATTENTION_SIGNALS
            if (
                signals is None
                or not set(live) <= set(signals.token_ids.tolist())
                or not policy.signals <= signals.values.keys()
                or (attention and not observed & set(live))
            ):
                self.counts.postponed += 1
                naive.next_due = request.done + config.evict_interval_tokens
                return 0, candidates, False
            blind = naive.prefill_end if not policy.signals & DECODE_SIGNALS else len(naive.key)
            candidates = [token for token in candidates if token in observed or token >= blind]
        if policy.whole_pages:
            excess -= excess % self.block_size
            full = Counter(token // self.block_size for token in candidates)
            candidates = [t for t in candidates if full[t // self.block_size] == self.block_size]
        return max(0, min(excess, len(candidates))), candidates, True

    def _on_eviction(self, kv: RequestKV, num_tokens: int, victims: np.ndarray) -> None:
        if self._early is not None:
            self._early.append((kv.req_id, num_tokens, victims.tolist()))
        else:
            assert self._victims is None, "two evictions in one call"
            self._victims = victims.tolist()
        self.eviction_log.append((kv.req_id, num_tokens, victims.tolist()))

    def _forget(self, request: Request) -> None:
        """Finish, abort and preemption: the layer first, then the pool, as in vLLM."""
        naive = self.naive.requests.pop(request.req_id)
        self.layer.forget(request.req_id)
        self.pool.release(request.req_id)
        self.running.remove(request)
        for ticket, plans in self.in_flight.items():
            self.in_flight[ticket] = [
                (None if owner is naive else owner, plan) for owner, plan in plans
            ]
        self.check()

    def _take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports


# -- random driving ------------------------------------------------------------------------

PATCHES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("policy", (*sorted(POLICIES), *["random"] * 6, "no_such_policy")),
    ("budget_tokens", (8, 12, 20, 30, 0)),
    ("keep_ratio", (0.2, 0.5, 0.9, 1.5)),
    ("theta_f", (0.0, 0.0, 0.1, 0.3, 1.0)),
    ("low_watermark_ratio", (0.2, 1.0, 1.0, 1.0)),
    ("max_source_blocks", (2, 3, 8)),
    ("relocate_shared", (True, True, True, False)),
    ("relocate_into_cached", (False, False, True)),
    ("max_blocks_per_request", (None, None, None, 3, 6)),
    ("check_interval_steps", (1, 1, 3)),
    ("evict_interval_tokens", (1, 2, 7)),
    ("evict_during_prefill", (False, True)),
    ("evict_free_ratio", (0.0, 0.3, 1.0, 1.0)),
    ("recent_tokens", (1, 2, 5)),
    ("sink_tokens", (0, 1, 2)),
)


def drive(model: EngineModel, rng: random.Random, num_operations: int) -> None:
    """Let random things happen until ``num_operations`` changes were checked, then drain."""
    trail: deque[str] = deque(maxlen=30)
    while model.counts.operations < num_operations:
        try:
            act(model, rng, trail)
        except Exception as error:
            error.add_note(f"after {model.counts.operations} operations, last: {' '.join(trail)}")
            raise
    model.drain()


def act(model: EngineModel, rng: random.Random, trail: deque[str]) -> None:
    """One random thing; what is drawn does not depend on the state of the layer."""
    actions: dict[str, tuple[int, Callable[[], None]]] = {
        "schedule": (30, lambda: model.schedule(rng.randint(1, 12), rng.randint(0, 9), 1)),
        "execute": (28, lambda: model.execute(random_fate(rng), rng.random() < 0.2)),
        "output": (28, model.process_output),
        "copy": (6, model.copy),
        "add": (8, lambda: _add_random_request(model, rng)),
        "abort": (1, lambda: model.abort(rng.randint(0, 9))),
        "abandon": (1, model.abandon),
        "preempt": (2, lambda: model.preempt(rng.randint(0, 9))),
        "patch": (2, lambda: _patch_randomly(model, rng)),
    }
    name = rng.choices(list(actions), [weight for weight, _ in actions.values()])[0]
    trail.append(name)
    actions[name][1]()


def drive_sharing(model: EngineModel, rng: random.Random, num_operations: int) -> None:
    """As :func:`drive`, but requests come in bursts and keep pace, so that holders of a shared
    prefix have evicted at the same time."""
    while model.counts.operations < num_operations:
        for _ in range(rng.randint(0, 2)):
            _add_random_request(model, rng)
        model.schedule(rng.randint(8, 64), rng.randint(0, 19), 3)
        if rng.random() < 0.9:
            model.execute(random_fate(rng), rng.random() < 0.1)
        if rng.random() < 0.9:
            model.process_output()
        if rng.random() < 0.2:
            model.copy()
        if rng.random() < 0.05:
            model.abort(rng.randint(0, 9))
        if rng.random() < 0.02:
            model.preempt(rng.randint(0, 9))
    model.drain()


def random_fate(rng: random.Random) -> str:
    """What becomes of the copies of a step."""
    return rng.choices(["right", "fails", "damaged"], [0.87, 0.08, 0.05])[0]


def _add_random_request(model: EngineModel, rng: random.Random) -> None:
    model.add_request(
        num_prompt=rng.randint(*model.prompt_tokens),
        num_output=rng.randint(1, 40),
        family=rng.randint(1, 2),
        num_shared=rng.choice(model.shared_tokens),
        options=rng.choice(OPTIONS) if rng.random() < model.options_ratio else None,
    )


def _patch_randomly(model: EngineModel, rng: random.Random) -> None:
    name, values = rng.choice(PATCHES)
    model.patch({name: rng.choice(values)}, for_new_only=rng.random() < 0.4)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"vtoken_policy": "random"},
    {"vtoken_policy": "h2o", "vtoken_budget_tokens": 10},
    {"vtoken_policy": "snapkv", "vtoken_keep_ratio": 0.5},
    {"vtoken_policy": "knorm", "vtoken_protect": "3:9"},
    {"vtoken_policy": "paged_eviction"},
    {"vtoken_policy": "none"},
    {"vtoken_budget_tokens": 14},
    {"vtoken_keep_ratio": 0.3, "vtoken_protect": ["0:5", "12:15"]},
    {"vtoken_protect": "2:40"},
    {"vtoken_evict": False},
)
"""What a client may ask for itself."""

RARE = (
    *("urgent", "early", "early_evictions", "lost", "postponed", "shared", "packed", "opted_out"),
    *("mid_prefill", "early_by_score", "lost_bytes", "abandoned"),
)
"""What needs a pool that runs dry, a patch to a policy with signals or to a cap, a request of a
rare kind, or holders in step."""


def assert_busy(counts: Counts, may_be_idle: tuple[str, ...] = ()) -> None:
    """Nothing that a run is meant to exercise stayed out."""
    idle = [name for name, value in vars(counts).items() if not value and name not in may_be_idle]
    if idle:
        pytest.fail(f"never happened: {idle}; {counts}")
