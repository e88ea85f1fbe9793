"""What a change of the policy document would do, request by request; changes nothing.

The numbers are those of this moment: a request that decodes on meanwhile has more to lose.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.documents import POOL_FIELDS, Document
from vtoken.eviction import Evictor
from vtoken.eviction_choice import (
    Choice,
    first_eviction_at,
    target_live_tokens,
    what_may_go,
)
from vtoken.history import ChangeInfo, diff
from vtoken.observation import ATTENTION_SIGNALS, RequestSignals
from vtoken.occupancy import GIVEN_BACK
from vtoken.policies.base import checked_victims
from vtoken.request_kv import RequestKV

logger = logging.getLogger(__name__)

_MUCH_RATIO = 0.5
"""Losing more than this share of the live tokens at once earns a warning."""


@dataclass(frozen=True)
class RequestPreview:
    """One running request under the document that it would follow.

    Attributes:
        request_id: of the engine.
        policy_version: of the document that it would follow.
        policy: that it would have.
        num_tokens: logical length.
        live_tokens: at present.
        evicted_tokens: how many its next eviction would take if it came now.
        freed_blocks: how many blocks would be left without live token by that; None if which
            tokens go depends on attention scores or on the cache, which are not at hand.
        freed_blocks_repacked: how many at most, once its live tokens are repacked; None in
            mode ``naive``.
        next_eviction: when that is: ``next step``, ``after its prefill``, ``after n tokens``,
            ``when the pool is fuller`` or ``never``.
    """

    request_id: str
    policy_version: int
    policy: str
    num_tokens: int
    live_tokens: int
    evicted_tokens: int
    freed_blocks: int | None
    freed_blocks_repacked: int | None
    next_eviction: str


def preview(
    evictor: Evictor, requests: Iterable[RequestKV], document: Document, info: ChangeInfo
) -> dict[str, Any]:
    """The difference, each running request, and sums, as plain data.

    Args:
        evictor: knows the documents in force; does not change.
        requests: all that run.
        document: the one that would be put in force.
        info: whether for new requests only.
    """
    requests = list(requests)
    for_all = info.apply_to == "running"
    follows = {kv.req_id: document if for_all else evictor.document_of(kv) for kv in requests}
    seen = [_preview(evictor, kv, follows[kv.req_id], document.config) for kv in requests]
    known = [p.freed_blocks for p in seen if p.freed_blocks is not None]
    return {
        "changes": diff(evictor.documents.current.config, document.config),
        "requests": [asdict(p) for p in seen],
        "totals": {
            "evicted_tokens": sum(p.evicted_tokens for p in seen),
            "freed_blocks": sum(known) if len(known) == len(seen) else None,
        },
    }


def _preview(
    evictor: Evictor, kv: RequestKV, document: Document, pool: VTokenConfig
) -> RequestPreview:
    policy = evictor.policy_of(kv, document)
    choice = _choice(evictor, kv, document)
    num_victims = 0 if choice is None else choice.num_victims
    freed: int | None = 0
    if choice is not None:
        freed = _freed_at_once(evictor, kv, document, choice)
    left = kv.num_live - num_victims
    repacked = kv.num_retained - -(-left // kv.table.block_size)
    return RequestPreview(
        request_id=kv.req_id,
        policy_version=document.version,
        policy=policy.name if kv.options.evict else "none",
        num_tokens=kv.num_tokens,
        live_tokens=kv.num_live,
        evicted_tokens=num_victims,
        freed_blocks=freed,
        freed_blocks_repacked=max(0, repacked) if pool.relocates else None,
        next_eviction=_when(evictor, kv, document),
    )


def _choice(evictor: Evictor, kv: RequestKV, document: Document) -> Choice | None:
    """What the request's policy would be asked for if it were due now; None if for nothing."""
    policy, live_ids = evictor.policy_of(kv, document), kv.table.live_ids()
    target = target_live_tokens(kv, document.config, kv.num_tokens)
    if not policy.evicts or len(live_ids) <= target:
        return None
    seen = RequestSignals(live_ids, len(live_ids))
    choice = what_may_go(kv, policy, document.config, kv.num_tokens, seen)
    return choice if choice.num_victims > 0 else None


def _freed_at_once(
    evictor: Evictor, kv: RequestKV, document: Document, choice: Choice
) -> int | None:
    policy = evictor.policy_of(kv, document)
    if policy.signals:
        return None
    try:
        victims = checked_victims(policy, *choice)
    except Exception:
        logger.exception("policy %r failed in a preview of request %s", policy.name, kv.req_id)
        return None
    blocks = kv.blocks
    lost = np.bincount(kv.table.blocks_of(victims), minlength=int(blocks.ids.max()) + 1)
    left = blocks.num_live - lost[blocks.ids]
    empty = (left == 0) & (blocks.ids != GIVEN_BACK)
    empty[kv.num_tokens // kv.table.block_size :] = False
    if kv.plan is not None:
        empty[kv.plan.source_indices] = False
    return int(np.count_nonzero(empty))


def _when(evictor: Evictor, kv: RequestKV, document: Document) -> str:
    config = document.config
    if not evictor.policy_of(kv, document).evicts:
        return "never"
    if kv.num_tokens < first_eviction_at(config, kv.prefill_end):
        return "after its prefill"
    if not evictor.may_evict(config):
        return "when the pool is fuller"
    wait = max(0, kv.next_evict_at - kv.num_tokens)
    if document is not evictor.document_of(kv):
        fixed = kv.options.policy_key is not None and kv.options.has_own_budget
        late = bool(_missing(evictor, kv, document)) and kv.num_tokens >= kv.prefill_end
        wait = wait if fixed else config.evict_interval_tokens if late else 0
    return f"after {wait} tokens" if wait else "next step"


def _missing(evictor: Evictor, kv: RequestKV, document: Document) -> frozenset[str]:
    """Attention scores that the request would need and that nobody has observed for it."""
    needed, known = evictor.policy_of(kv, document).signals, evictor.policy_of(kv).signals
    return (needed - known) & ATTENTION_SIGNALS


def warnings(
    evictor: Evictor, requests: list[RequestKV], document: Document, info: ChangeInfo
) -> list[str]:
    """What a person should know about the change, in sentences; pure."""
    before, after = evictor.documents.current.config, document.config
    changed = diff(before, after).keys()
    found = []
    if info.apply_to == "new" and (pool := sorted(changed & POOL_FIELDS)):
        found.append(f"pool: {', '.join(pool)} concern the whole pool and change at once")
    if before.evict_free_ratio >= 1 > after.evict_free_ratio:
        found.append("quality: with evict_free_ratio below 1 answers depend on the load")
    if after.budget_tokens is None and after.keep_ratio != before.keep_ratio:
        least = after.sink_tokens + after.recent_tokens
        found.append(
            f"below protected tokens: requests keep their first {after.sink_tokens} and newest "
            f"{after.recent_tokens} tokens in any case, so those shorter than "
            f"{least / (after.keep_ratio or 1):.0f} tokens keep more than keep_ratio"
        )
    if info.apply_to == "running":
        found += _about_running(evictor, requests, document)
    elif document.policy.signals & ATTENTION_SIGNALS - evictor.policy.signals:
        found.append("attention: the policy needs attention scores: observed from now on")
    return found


def _about_running(evictor: Evictor, requests: list[RequestKV], document: Document) -> list[str]:
    late = [kv for kv in requests if _missing(evictor, kv, document)]
    own = [kv for kv in requests if kv.options.policy_key or kv.options.has_own_budget]
    choices = [(kv, _choice(evictor, kv, document)) for kv in requests]
    much = [kv for kv, c in choices if c and c.num_victims > _MUCH_RATIO * kv.num_live]
    short = [
        kv
        for kv, c in choices
        if c and kv.num_live - c.num_victims > _target(kv, document) + kv.table.block_size
    ]
    found = []
    if late or document.policy.signals & ATTENTION_SIGNALS - evictor.policy.signals:
        interval = document.config.evict_interval_tokens
        found.append(
            "attention: the policy needs attention scores: observed from now on; "
            f"{len(late)} running requests wait {interval} tokens before they lose any"
        )
    if much:
        found.append(
            f"quality: {len(much)} running requests lose more than half of their tokens at once"
        )
    if short:
        found.append(
            f"below protected tokens: {len(short)} running requests keep more than the budget, "
            "because what is protected does not fit into it"
        )
    if own:
        found.append(f"own options: {len(own)} running requests keep what they set themselves")
    return found


def _target(kv: RequestKV, document: Document) -> int:
    return target_live_tokens(kv, document.config, kv.num_tokens)
