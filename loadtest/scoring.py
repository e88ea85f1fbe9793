"""How far two answers, or two distributions, are apart: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Distribution = Mapping[str, float]
"""Token to log-probability, of the most likely tokens."""


def rouge_l(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """F1 of the longest common subsequence; 1 for two empty sequences."""
    if not ours and not theirs:
        return 1.0
    common = longest_common(ours, theirs)
    return 2 * common / (len(ours) + len(theirs))


def longest_common(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(theirs) + 1)
    for a in ours:
        previous = 0
        for j, b in enumerate(theirs):
            above = row[j + 1]
            row[j + 1] = previous + 1 if a == b else max(above, row[j])
            previous = above
    return row[-1]


def common_prefix_ratio(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Share of ``theirs`` that ``ours`` gives in the same places before the first difference."""
    if not theirs:
        return 1.0
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    return first / len(theirs)


def match_ratio(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Share of ``theirs`` that ``ours`` has in the same place."""
    if not theirs:
        return 1.0
    return sum(int(a == b) for a, b in zip(ours, theirs, strict=False)) / len(theirs)


def kl_lower_bound(reference: Distribution, other: Distribution) -> float:
    """KL(reference ‖ other) in nats, from the most likely tokens of both.

    Tokens that not both list are merged into one event, which can only lower a divergence.
    """
    shared = reference.keys() & other.keys()
    p = [math.exp(reference[token]) for token in shared]
    q = [math.exp(other[token]) for token in shared]
    p.append(max(0.0, 1 - math.fsum(p)))
    q.append(max(1e-12, 1 - math.fsum(q)))
    total: float = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    return max(0.0, total)


def top_token(distribution: Distribution) -> str:
    """The most likely token."""
    return max(distribution, key=lambda token: distribution[token])


def read_prompt_logprobs(entries: Sequence[Any], prompt: Sequence[int]) -> list[Distribution]:
    """The distributions of a completion's ``prompt_logprobs`` but for the first token.

    Entry ``i`` predicts ``prompt[i + 1]`` and has that token in any case.
    """
    return [
        {str(token): float(value["logprob"]) for token, value in entry.items()}
        for entry in entries[1 : len(prompt)]
    ]
