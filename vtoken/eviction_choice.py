"""What an eviction asks of a policy: how many tokens must go, and which may. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtoken.block_cap import capped_target
from vtoken.config import VTokenConfig
from vtoken.observation import ATTENTION_SIGNALS, DECODE_SIGNALS, RequestSignals
from vtoken.policies.base import (
    EvictionPolicy,
    LiveView,
    protect_partial_pages,
    protect_spans,
    protected_tokens,
)
from vtoken.request_kv import RequestKV
from vtoken.types import BoolArray, IdArray


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


def usable_signals(
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
