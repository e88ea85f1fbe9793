"""Figures of the running text about what eviction does to answers: see ``claims.py``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from tests.loadtest.published.cells import Cell, plain
from tests.loadtest.published.computed import Claim, half_width, means, span, value
from tests.loadtest.published.numbers import interval, number
from tests.loadtest.published.quality import POLICIES
from tests.loadtest.published.results import Result, difference

SOURCE = "quality_damage"
TEXT, KL = "nll_above_full", "kl_top20"
AIM_NATS = 0.01


def arms(keep: str) -> list[str]:
    """Of all policies."""
    return [f"{policy}@{keep}" for policy in POLICIES]


def half_widths(metric: str, keep: str) -> Callable[[Result], list[float]]:
    """Of each policy's interval."""

    def found(result: Result) -> list[float]:
        return [half_width(mean) for arm in arms(keep) if (mean := result.mean(arm, metric))]

    return found


def between_two(metric: str, keep: str) -> Callable[[Result], list[float]]:
    """Half of the interval of each difference between two policies in the same cases."""

    def found(result: Result) -> list[float]:
        pairs = combinations(arms(keep), 2)
        return [half_width(difference(result, metric, *pair)) for pair in pairs]

    return found


def cases_needed(metric: str, keep: str) -> Callable[[Result], list[float]]:
    """Cases with which two policies would be known to ``AIM_NATS``: intervals shrink with √n."""

    def found(result: Result) -> list[float]:
        num_cases = len(result.samples(arms(keep)[0], metric))
        widths = between_two(metric, keep)(result)
        return [num_cases * (width / AIM_NATS) ** 2 for width in widths]

    return found


def tens(function: Callable[[Result], list[float]]) -> list[Cell]:
    """The least and the most, rounded to tens."""
    return [
        lambda result, _: number(min(function(result)), nearest=10),
        lambda result, _: number(max(function(result)), nearest=10),
    ]


def above_window(policy: str, keep: str) -> list[Cell]:
    """What a policy loses of text beyond ``streaming_llm``, and the interval."""

    def cell(result: Result, _: str) -> str:
        figure = difference(result, TEXT, f"{policy}@{keep}", f"streaming_llm@{keep}")
        return number(figure.value, 3)

    def ends(result: Result, _: str) -> str:
        figure = difference(result, TEXT, f"{policy}@{keep}", f"streaming_llm@{keep}")
        return interval(figure, 3).strip()

    return [cell, ends]


def known_to(policy: str, keep: str) -> Cell:
    """Half of the interval of the same difference."""
    pair = f"{policy}@{keep}", f"streaming_llm@{keep}"
    return value(lambda result: half_width(difference(result, TEXT, *pair)), 3)


def right(result: Result) -> list[float]:
    """Per cent of digits of numbers and facts that are the most likely ones at a half."""
    both = [means(metric, arms("0.5"))(result) for metric in ("lookup_match", "needle_match")]
    return [100 * share for shares in both for share in shares]


DAMAGE = [
    Claim(
        SOURCE,
        "half of the tokens gone costs {} to {} nats of text",
        span(means(TEXT, arms("0.5")), 2),
    ),
    Claim(
        SOURCE,
        "+ {} nats {} and + {} {} against `streaming_llm`",
        [*above_window("paged_eviction", "0.5"), *above_window("random", "0.5")],
    ),
    Claim(
        SOURCE,
        "(text + {} and {}, ± {} and ± {})",
        [
            above_window("scissorhands", "0.9")[0],
            above_window("scissorhands", "0.5")[0],
            known_to("scissorhands", "0.9"),
            known_to("scissorhands", "0.5"),
        ],
    ),
    Claim(
        SOURCE,
        "{} to {} % of the digits are right, where full attention has {} %",
        [*span(right), plain("lookup_match", arm="full@1", scale=100)],
    ),
    Claim(
        SOURCE,
        "{} to {} % of it come before the first difference",
        span(means("same_until", arms("0.5")), scale=100),
    ),
    Claim(SOURCE, "there it is {} to {} %", span(means("exact_match", arms("0.9")), 1, scale=100)),
    Claim(
        SOURCE,
        "text is known to ± {} … {} and KL to ± {} … {}",
        [*span(half_widths(TEXT, "0.9"), 3), *span(half_widths(KL, "0.9"), 3)],
    ),
    Claim(
        SOURCE,
        "varies with the text: ± {} … {}, KL ± {} … {}",
        [*span(half_widths(TEXT, "0.5"), 3), *span(half_widths(KL, "0.5"), 3)],
    ),
    Claim(SOURCE, "KL is known to ± {} … {} there", span(between_two(KL, "0.5"), 3)),
    Claim(
        SOURCE,
        "would take {} to {} cases, and text {} to {}",
        [*tens(cases_needed(KL, "0.5")), *tens(cases_needed(TEXT, "0.5"))],
    ),
    Claim(
        SOURCE,
        "the cases, up to {}, that would tell policies apart to 0.01 nats of text",
        [tens(cases_needed(TEXT, "0.5"))[1]],
    ),
]
