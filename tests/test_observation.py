"""Which queries are observed, and how signals follow tokens that died meanwhile."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.observation import (
    ATTENTION_PREFILL,
    ATTENTION_SUM,
    KEY_NORM,
    Observe,
    RequestSignals,
    queries_to_observe,
)

SUM = frozenset({ATTENTION_SUM})
CONFIG = VTokenConfig(score_window_tokens=16, score_interval_steps=4)


def observe(before: int, after: int, signals: frozenset[str] = SUM, due: int = 100) -> int:
    """Number of observed queries of one step, prefill of 100 tokens."""
    found = queries_to_observe(signals, CONFIG, before, after, 100, due)
    return found.num_queries if found else 0


@given(st.sets(st.integers(1, 99)), st.integers(0, 99))
def test_prefill_window_does_not_depend_on_chunks(cuts: set[int], num_cached: int) -> None:
    """The same queries are observed however the prefill is cut; a cached prefix shortens it."""
    edges = sorted({num_cached, 100} | {cut for cut in cuts if cut > num_cached})
    observed = []
    for before, after in pairwise(edges):
        num = observe(before, after)
        observed += range(after - num, after)
    assert observed == list(range(max(84, num_cached), 100))


def test_prefill_chunk_says_that_it_is_prefill() -> None:
    """The flag depends on where the query lies, not on how many there are."""
    assert queries_to_observe(SUM, CONFIG, 99, 100, 100, 100) == Observe(1, True)
    assert queries_to_observe(SUM, CONFIG, 100, 101, 100, 101) == Observe(1, False)


def test_decode_is_observed_every_interval_and_when_due() -> None:
    """Counted back from the next eviction, so that its step is always observed."""
    observed = [after for after in range(101, 117) if observe(after - 1, after, due=116)]
    assert observed == [104, 108, 112, 116]
    assert observe(120, 121, due=116) == 1


@pytest.mark.parametrize(
    ("signals", "prefill", "decode"),
    [
        (frozenset(), 0, 0),
        (frozenset({KEY_NORM}), 0, 0),
        (frozenset({ATTENTION_PREFILL}), 16, 0),
        (SUM, 16, 1),
        (frozenset({ATTENTION_SUM, KEY_NORM}), 16, 1),
    ],
)
def test_only_what_a_policy_needs_is_observed(
    signals: frozenset[str], prefill: int, decode: int
) -> None:
    """No query is looked at for keys alone, and no decode for the prefill's attention."""
    assert observe(0, 100, signals) == prefill
    assert observe(115, 116, signals, due=116) == decode


def test_decode_stands_in_for_a_window_that_was_missed() -> None:
    """A policy that came after the prefill sees decode queries as its window."""
    signals = frozenset({ATTENTION_PREFILL})
    found = queries_to_observe(signals, CONFIG, 115, 116, 100, 116, window_missed=True)
    assert found == Observe(1, True)
    assert queries_to_observe(SUM, CONFIG, 115, 116, 100, 116, window_missed=True) == (1, False)
    late = [
        after
        for after in range(101, 140)
        if queries_to_observe(signals, CONFIG, after - 1, after, 100, 140, window_missed=True)
    ]
    window = range(140 - CONFIG.score_window_tokens + 1, 140)
    assert late == sorted({*range(104, 140, CONFIG.score_interval_steps), *window})


def test_overdue_window_is_observed_by_the_interval_only() -> None:
    """While the pool is ample, nothing is evicted and nobody looks at every query."""
    signals = frozenset({ATTENTION_PREFILL})
    found = [
        after
        for after in range(141, 161)
        if queries_to_observe(
            signals, CONFIG, after - 1, after, 100, 140, may_evict=False, window_missed=True
        )
    ]
    assert found == [144, 148, 152, 156, 160]


@given(st.sets(st.integers(0, 60), min_size=1), st.data())
def test_aligned_follows_the_tokens_that_are_left(ids: set[int], data: st.DataObject) -> None:
    """Values stay with their token, and the observed ones stay the leading ones."""
    tokens = np.array(sorted(ids), np.int64)
    num_observed = data.draw(st.integers(0, len(tokens)))
    signals = RequestSignals(tokens, num_observed, {"x": tokens * 10.0})
    left = np.array(sorted(data.draw(st.sets(st.sampled_from(sorted(ids))))), np.int64)
    aligned = signals.aligned(left)
    assert aligned is not None
    assert aligned.values["x"].tolist() == [10.0 * i for i in left]
    seen = set(tokens[:num_observed].tolist())
    assert left[: aligned.num_observed].tolist() == [i for i in left if i in seen]


def test_aligned_refuses_tokens_that_were_not_there() -> None:
    """A report of another life of the request is no report."""
    signals = RequestSignals(np.array([1, 3]), 2, {"x": np.zeros(2)})
    for ids in ([1, 2], [4], [0]):
        assert signals.aligned(np.array(ids)) is None
