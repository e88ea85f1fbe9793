"""Policies that look at no token: how many may go, and a seed, is all that they need.

Such a policy names *ranks* among the tokens that may go, for all requests that are due in a step
at once. So nobody has to list the live tokens of any of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from vtoken.errors import PolicyError
from vtoken.policies.base import EvictionPolicy, LiveView
from vtoken.types import BoolArray, IdArray

RankArray = NDArray[np.int64]


class RankQuestion(NamedTuple):
    """What a policy is asked for some requests; int64 ``[n]`` each.

    Attributes:
        num_candidates: live tokens that may go.
        num_victims: of these must go, maybe none.
        num_tokens, request_seeds: as in :class:`~vtoken.policies.base.LiveView`.
    """

    num_candidates: RankArray
    num_victims: RankArray
    num_tokens: RankArray
    request_seeds: RankArray


class RankPolicy(EvictionPolicy):
    """A policy whose choice is one of ranks."""

    @abstractmethod
    def select_ranks(self, asked: RankQuestion) -> RankArray:
        """Choose, for each request on its own.

        Returns:
            One request after the other ``num_victims`` distinct ranks below ``num_candidates``,
            ascending; ``[num_victims.sum()]``. What a request gets does not depend on the others.
        """

    @final
    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """The tokens of the ranks that the policy chooses."""
        candidates = view.live_ids[~protected]
        numbers = (len(candidates), num_victims, view.num_tokens, view.request_seed)
        asked = RankQuestion(*(np.array([number], np.int64) for number in numbers))
        return candidates[self.select_ranks(asked)]


def checked_ranks(policy: RankPolicy, asked: RankQuestion) -> RankArray:
    """Ask the policy and refuse an answer that breaks its contract.

    Raises:
        PolicyError: a wrong number of ranks, repeated or unordered ones, or some out of range.
    """
    ranks = np.asarray(policy.select_ranks(asked))
    expected = int(asked.num_victims.sum())
    if ranks.shape != (expected,) or ranks.dtype.kind != "i":
        raise PolicyError(
            f"policy {policy.name!r}: expected {expected} ranks, got {ranks.dtype} {ranks.shape}"
        )
    owner = np.repeat(np.arange(len(asked.num_victims)), asked.num_victims)
    unordered = (ranks[1:] <= ranks[:-1]) & (owner[1:] == owner[:-1])
    if np.count_nonzero(unordered):
        raise PolicyError(f"policy {policy.name!r}: ranks are not distinct and ascending")
    wrong = (ranks < 0) | (ranks >= asked.num_candidates[owner])
    if np.count_nonzero(wrong):
        i = int(wrong.argmax())
        limit = asked.num_candidates[owner[i]]
        raise PolicyError(f"policy {policy.name!r}: rank {ranks[i]} of {limit} candidates")
    return ranks.astype(np.int64)
