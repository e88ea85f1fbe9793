"""Random eviction: the paper's stress test, since it scatters survivors over all blocks.

Numbers come from a counter-based generator (SplitMix64, Steele et al. 2014), whose whole state is
the key of a request: so the draws of all requests of a step are a few operations on arrays, where
a generator object for each costs more than everything else of an eviction.
"""

import numpy as np
from numpy.typing import NDArray

from vtoken.policies.ranks import RankArray, RankPolicy, RankQuestion
from vtoken.table_store import ragged

_Bits = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = 2**64 - 1


class RandomPolicy(RankPolicy):
    """Evicts uniformly among unprotected tokens, reproducibly for a seed and a prompt."""

    name = "random"
    summary = "Uniformly random victims among unprotected tokens (seeded)."

    def select_ranks(self, asked: RankQuestion) -> RankArray:
        """A uniform draw without replacement; depends on seed, prompt and length only."""
        keys = np.full(len(asked.num_tokens), self.seed & _WORD, np.uint64)
        for part in (asked.request_seeds, asked.num_tokens):
            keys = _mixed(keys * _GAMMA + part.astype(np.uint64))
        few = 2 * asked.num_victims <= asked.num_candidates
        if few.all():
            return _distinct(keys, asked.num_candidates, asked.num_victims)
        drawn: list[RankArray] = []
        for i in range(len(keys)):
            draw = _distinct if few[i] else _smallest
            one = slice(i, i + 1)
            drawn.append(draw(keys[one], asked.num_candidates[one], asked.num_victims[one]))
        return np.concatenate(drawn)


def _mixed(bits: _Bits) -> _Bits:
    """SplitMix64's finaliser: every bit of the result depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _numbers(keys: _Bits, counters: NDArray[np.int64]) -> _Bits:
    """The numbers at these places of the sequences of ``keys``."""
    return _mixed(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _distinct(keys: _Bits, bounds: RankArray, counts: RankArray) -> RankArray:
    """Draw until ``counts[i]`` distinct numbers below ``bounds[i]`` have come; ascending."""
    found = np.empty(0, np.int64)  # request * 2^32 + rank, so that a sort keeps requests apart
    used, missing = np.zeros_like(counts), counts
    while len(found) < counts.sum():
        owner = np.arange(len(keys)).repeat(missing)
        bits = _numbers(keys[owner], ragged(used, missing)) >> np.uint64(32)
        ranks = (bits * bounds[owner].astype(np.uint64)) >> np.uint64(32)
        found = np.concatenate([found, (owner << 32) | ranks.astype(np.int64)])
        found.sort()
        repeated = found[1:] == found[:-1]
        if repeated.any():
            found = np.delete(found, repeated.nonzero()[0])
        used = used + missing
        missing = counts - np.bincount(found >> 32, minlength=len(keys))
    return found & 0xFFFFFFFF


def _smallest(keys: _Bits, bounds: RankArray, counts: RankArray) -> RankArray:
    """For one request that loses most of its candidates: those with the smallest numbers."""
    order = np.argsort(_numbers(keys, np.arange(int(bounds[0]))), kind="stable")
    ranks: RankArray = np.sort(order[: int(counts[0])])
    return ranks
