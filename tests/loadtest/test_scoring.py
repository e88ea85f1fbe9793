"""Distances between answers and distributions."""

from __future__ import annotations

import math

import pytest

from loadtest.scoring import (
    common_prefix_ratio,
    kl_lower_bound,
    longest_common,
    match_ratio,
    read_prompt_logprobs,
    rouge_l,
    top_token,
)


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [("abcde", "ace", 3), ("abc", "abc", 3), ("abc", "xyz", 0), ("", "abc", 0), ("aab", "aba", 2)],
)
def test_longest_common_subsequence(ours, theirs, common):
    """In order, with gaps; either way round."""
    assert longest_common(ours, theirs) == longest_common(theirs, ours) == common


def test_rouge_l_is_an_f1():
    """3 of 5 and 3 of 3: 2·3 / 8."""
    assert rouge_l("abcde", "ace") == pytest.approx(0.75)
    assert rouge_l("abc", "abc") == 1
    assert rouge_l("", "") == 1
    assert rouge_l("", "a") == 0


def test_shares_of_matching_places():
    """Up to the first difference, and in all places; what is missing does not match."""
    assert common_prefix_ratio([1, 2, 9, 4], [1, 2, 3, 4]) == 0.5
    assert common_prefix_ratio([1, 2], [1, 2, 3, 4]) == 0.5
    assert match_ratio([1, 2, 9, 4], [1, 2, 3, 4]) == 0.75
    assert match_ratio([1], [1, 2]) == 0.5
    assert common_prefix_ratio([1], []) == match_ratio([1], []) == 1


def log(**probabilities: float) -> dict[str, float]:
    return {token: math.log(p) for token, p in probabilities.items()}


def test_kl_of_whole_distributions_is_exact():
    """With all tokens listed in both, nothing is merged."""
    p, q = log(a=0.7, b=0.3), log(a=0.4, b=0.6)
    exact = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6)
    assert kl_lower_bound(p, q) == pytest.approx(exact, abs=1e-6)
    assert kl_lower_bound(p, p) == pytest.approx(0.0, abs=1e-9)


def test_kl_of_the_likely_tokens_is_a_lower_bound():
    """Leaving tokens out of either list can only lower it, never below zero."""
    whole_p, whole_q = log(a=0.5, b=0.3, c=0.2), log(a=0.2, b=0.2, c=0.6)
    exact = kl_lower_bound(whole_p, whole_q)
    for left_out in ("b", "c"):
        p = {t: v for t, v in whole_p.items() if t != left_out}
        assert 0 <= kl_lower_bound(p, whole_q) <= exact + 1e-9
    assert kl_lower_bound(log(a=0.5), log(b=0.5)) == 0


def test_top_token_is_the_most_likely():
    """By log-probability."""
    assert top_token(log(a=0.2, b=0.5, c=0.3)) == "b"


def test_prompt_logprobs_are_read_from_the_second_token_on():
    """Nothing predicts the first; what was generated afterwards is left out."""
    entries = [None, {"5": {"logprob": -1.0, "rank": 1}}, {6: {"logprob": -2.0}}, {"7": {}}]
    assert read_prompt_logprobs(entries, [4, 5, 6]) == [{"5": -1.0}, {"6": -2.0}]
