"""Samples become means with intervals, and ratios over pairs."""

from __future__ import annotations

import math

import pytest

from loadtest.outcome import Outcome, describe_arms, describe_comparisons


def make_outcome() -> Outcome:
    outcome = Outcome()
    for repeat in range(4):
        outcome.add("ours", {"blocks": 10 + repeat, "preemptions": 0})
        outcome.add("theirs", {"blocks": 20 + 2 * repeat, "preemptions": 1})
    outcome.compare("ours", "theirs", ("blocks", "preemptions", "no_such"))
    return outcome


def test_arms_have_mean_interval_and_raw_samples():
    """As agreed for the JSON."""
    found = describe_arms(make_outcome().arms)["ours"]["blocks"]
    assert found["mean"] == 11.5
    assert found["samples"] == [10, 11, 12, 13]
    assert found["ci95"][0] < 11.5 < found["ci95"][1]


def test_comparisons_are_ratios_with_what_they_rest_on():
    """Exactly one half in every pair: no spread, and two pairs would do."""
    found = describe_comparisons(make_outcome())
    assert set(found) == {"blocks: ours / theirs"}
    ratio = found["blocks: ours / theirs"]
    assert ratio["ratio"] == 0.5
    assert ratio["ci95"] == pytest.approx([0.5, 0.5])
    assert (ratio["pairs"], ratio["pairs_for_5_percent"]) == (4, 2)


def test_impossible_comparisons_are_left_out():
    """Zeros, unequal numbers of samples, unknown arms."""
    outcome = make_outcome()
    outcome.compare("ours", "nobody", ("blocks",))
    outcome.add("ours", {"blocks": 1, "preemptions": 0})
    assert describe_comparisons(outcome) == {}


def test_a_repeat_that_could_not_say_is_no_pair_and_moves_no_other():
    """Each arm lacks the metric in another repeat: two of four pairs are left, the right ones."""
    outcome = Outcome()
    for repeat in range(4):
        outcome.add("ours", {"steps": 1} | ({} if repeat == 0 else {"blocks": 10.0**repeat}))
        outcome.add("theirs", {"steps": 1} | ({} if repeat == 2 else {"blocks": 10.0**repeat}))
    outcome.compare("ours", "theirs", ("blocks",))
    ratio = describe_comparisons(outcome)["blocks: ours / theirs"]
    assert (ratio["ratio"], ratio["ci95"], ratio["pairs"]) == (1.0, [1.0, 1.0], 2)
    found = describe_arms(outcome.arms)["ours"]["blocks"]
    assert found["samples"] == [None, 10, 100, 1000]
    assert found["mean"] == 370
    outcome.add("nothing", {"steps": math.nan})
    assert describe_arms(outcome.arms)["nothing"]["steps"]["mean"] is None


def test_metrics_stay_in_the_order_in_which_they_came():
    """Files of two runs can be compared, and a table shows the first ones."""
    outcome = Outcome()
    names = [f"metric {n}" for n in range(12)]
    outcome.add("a", dict.fromkeys(names[:8], 1.0))
    outcome.add("a", dict.fromkeys(names, 2.0))
    assert list(describe_arms(outcome.arms)["a"]) == names


def test_one_pair_has_a_ratio_and_no_interval():
    """Nor a spread."""
    outcome = Outcome(arms={"a": {"m": [1.0]}, "b": {"m": [2.0]}})
    outcome.compare("a", "b", ("m",))
    assert describe_comparisons(outcome)["m: a / b"] == {"ratio": 0.5, "ci95": None, "pairs": 1}


def test_numbers_are_rounded_to_six_digits():
    """What is not a number passes."""
    found = describe_arms({"a": {"m": [1 / 3], "n": [math.inf]}})["a"]
    assert found["m"]["mean"] == 0.333333
    assert found["n"]["samples"] == [math.inf]
