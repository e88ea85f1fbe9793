"""Signals: what a policy may learn about tokens from the model, and when it is observed.

A policy names the signals it needs; without names nothing of this exists in the worker. The
scheduler decides, per request and step, how many of the step's last queries are observed
(pure functions below); the worker obeys and keeps the accumulators. Which queries are observed
depends on the request's own length only, never on batching or on where its prefill was cut
into chunks:

    prefill   the last ``score_window_tokens`` queries before ``prefill_end``; they see every
              live token, those from the prefix cache included
    chunk     with ``evict_during_prefill``, likewise the last queries of a chunk after which an
              eviction is due: the one case in which the cut into chunks matters
    decode    every ``score_interval_steps``-th query, counted so that the query whose step is
              followed by an eviction is always one of them
    late      a policy of the prefill's last queries that came after them: the last
              ``score_window_tokens`` queries before its first eviction stand in for them

One observed query yields one *mass* per live token: its softmax weight, averaged over heads and
sampled layers. The masses of one query sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtoken.config import VTokenConfig
from vtoken.types import IdArray

ATTENTION_SUM = "attention_sum"
"""float32: accumulated mass of all observed queries."""
ATTENTION_LAST = "attention_last"
"""float32: mass of the last observed query."""
ATTENTION_PREFILL = "attention_prefill"
"""float32: accumulated mass of the observed queries of the prefill alone; under a policy that
came after the prefill, of the last decode queries before its first eviction."""
ATTENTION_HISTORY = "attention_history"
"""uint64: one bit per observed query, the newest lowest; set where the mass exceeded the mean
mass ``1 / live tokens``. Holds the last 64 observations."""
KEY_NORM = "key_norm"
"""float32: L2 norm of the key, averaged over KV heads and sampled layers."""
KEY_REDUNDANCY = "key_redundancy"
"""float32: mean cosine of the key with those of all other live tokens, averaged likewise."""
VALUE_KEY_RATIO = "value_key_ratio"
"""float32: L2 norm of the value over that of the key, averaged likewise."""

PREFILL_SIGNALS = frozenset({ATTENTION_PREFILL})
"""Observed during prefill only."""
DECODE_SIGNALS = frozenset({ATTENTION_SUM, ATTENTION_LAST, ATTENTION_HISTORY})
"""Observed during prefill and decode."""
ATTENTION_SIGNALS = PREFILL_SIGNALS | DECODE_SIGNALS
"""Accumulated query by query; the others are computed from the cache when asked for."""
CACHE_SIGNALS = frozenset({KEY_NORM, KEY_REDUNDANCY, VALUE_KEY_RATIO})
"""Computed from K and V in the cache when asked for; every live token has them."""
SIGNALS = ATTENTION_SIGNALS | CACHE_SIGNALS


@dataclass(frozen=True)
class ObservationSpec:
    """What the worker must keep; equal from step to step unless policies come or go.

    Attributes:
        signals: names, members of :data:`SIGNALS`: all that some policy in use needs.
        layers: sampled attention layers, counted from 0, or None for the worker's default.
    """

    signals: frozenset[str]
    layers: tuple[int, ...] | None = None


class Observe(NamedTuple):
    """What to observe of one request in one step.

    Attributes:
        num_queries: how many of the step's last queries, at least 1.
        in_prefill: whether they belong to the prefill.
    """

    num_queries: int
    in_prefill: bool


@dataclass(frozen=True, eq=False)
class RequestSignals:
    """Signals of one request at the end of one step.

    Attributes:
        token_ids: ``[m]`` the tokens that were live in that step, ascending.
        num_observed: the first that many of them were seen by at least one observed query
            that is not older than they are; the others have no attention score yet.
        values: name to ``[m]``.
    """

    token_ids: IdArray
    num_observed: int
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def of_survivors(self, live_ids: IdArray) -> RequestSignals:
        """The same for the tokens of then that are among ``live_ids``, ascending, later on."""
        kept = np.flatnonzero(np.isin(self.token_ids, live_ids, assume_unique=True))
        num_observed = int(np.searchsorted(kept, self.num_observed))
        values = {name: array[kept] for name, array in self.values.items()}
        return RequestSignals(self.token_ids[kept], num_observed, values)

    def aligned(self, live_ids: IdArray) -> RequestSignals | None:
        """The same for the tokens that are left; None if some were not live in that step."""
        if len(self.token_ids) == len(live_ids) and (self.token_ids == live_ids).all():
            return self
        places = np.searchsorted(self.token_ids, live_ids)
        known = places < len(self.token_ids)
        if not known.all() or (self.token_ids[places] != live_ids).any():
            return None
        num_observed = int(np.searchsorted(places, self.num_observed))
        values = {name: array[places] for name, array in self.values.items()}
        return RequestSignals(live_ids, num_observed, values)


def queries_to_observe(
    signals: frozenset[str],
    config: VTokenConfig,
    num_before: int,
    num_after: int,
    prefill_end: int,
    next_evict_at: int,
    may_evict: bool = True,
    window_missed: bool = False,
) -> Observe | None:
    """Which queries of a step are observed for one request, if any; pure.

    Args:
        signals: that the policy needs.
        config: window and interval.
        num_before, num_after: logical length before and after the step.
        prefill_end: logical length at which the prefill is complete.
        next_evict_at: logical length at which the next eviction is due.
        may_evict: whether a due eviction would happen; else only the interval counts.
        window_missed: the policy came after the prefill: decode stands in for its window.
    """
    due = may_evict and num_after >= next_evict_at
    if num_before < prefill_end:
        end = num_after if due and config.evict_during_prefill else prefill_end
        first = max(num_before, end - config.score_window_tokens)
        wanted = signals & ATTENTION_SIGNALS and num_after > first
        return Observe(num_after - first, True) if wanted else None
    left = next_evict_at - num_after
    observed = due or left % config.score_interval_steps == 0
    if window_missed and signals & PREFILL_SIGNALS:
        in_window = observed or 0 <= left < config.score_window_tokens
        return Observe(1, True) if in_window else None
    return Observe(1, False) if observed and signals & DECODE_SIGNALS else None
