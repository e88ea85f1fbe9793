"""Finds the k-th live tokens of many requests at once, without reading all their live bits.

Groups of tokens (:mod:`vtoken.table_store`) know how many of them live, so only the groups that
are looked for are read token by token: a step costs as much for long requests as for short ones,
but for one number per group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.table_store import GROUP, TableStore, ragged
from vtoken.types import IdArray

_Index = NDArray[np.int64]
_Bytes = NDArray[np.uint64]
"""Eight small numbers each, the first in the lowest byte."""

_EACH = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)


class LiveIndex:
    """Ranks of live tokens, as they were when it was made.

    The *rank* of a token is how many live tokens of its request come before it: its column in
    the worker's row.
    """

    def __init__(self, store: TableStore, rows: _Index) -> None:
        """Read the live tokens per group of these requests; ``[n]``.

        Every method names a request by its index in ``rows``.
        """
        num_groups = -(-store.num_tokens[rows] // GROUP)
        self._groups = ragged(store.first_block[rows] * store.block_size // GROUP, num_groups)
        self._begin = num_groups.cumsum() - num_groups
        self._before = np.zeros(len(self._groups) + 1, np.int64)  # live tokens, of all requests
        store.group_live[self._groups].cumsum(out=self._before[1:])
        self._live = store.live.reshape(-1, GROUP)
        self._words = store.live.view(np.uint64).reshape(-1, GROUP // 8)

    def rank(self, requests: _Index, token_ids: IdArray) -> _Index:
        """How many live tokens lie below each id (up to the request's length); ``[m]``."""
        begin = self._begin[requests]
        group, within = begin + token_ids // GROUP, token_ids % GROUP
        ranks: _Index = self._before[group] - self._before[begin]
        partial = within.nonzero()[0]  # the others may be at the end of the last group
        live = self._live[self._groups[group[partial]]]
        live &= np.arange(GROUP) < within[partial, None]
        ranks[partial] += np.count_nonzero(live, axis=1)
        return ranks

    def token(self, requests: _Index, ranks: _Index) -> IdArray:
        """The tokens of these ranks, each less than the request's live tokens; ``[m]``."""
        begin = self._begin[requests]
        wanted = self._before[begin] + ranks
        group = self._before.searchsorted(wanted, "right") - 1
        words = self._words.take(self._groups[group], axis=0)
        left = (wanted - self._before[group]).astype(np.uint64)
        counts = np.bitwise_count(words).view(np.uint64)[:, 0]
        word, left = _find(counts, left)
        bit, _ = _find(words[np.arange(len(words)), word], left)
        ids: IdArray = (group - begin) * GROUP + word * 8 + bit
        return ids


def _find(counts: _Bytes, ranks: _Bytes) -> tuple[_Index, _Bytes]:
    """The first byte of each row up to which more than ``ranks`` are counted, and how many of
    them are left for it. All numbers are below 128; ``[n]`` each.

    A multiplication adds up bytes, and one subtraction compares all eight sums with the rank: a
    byte keeps its high bit where the sum is not larger.
    """
    up_to = counts * _EACH
    place = np.bitwise_count(((ranks * _EACH | _HIGH) - up_to) & _HIGH).astype(np.uint64)
    before = ((up_to << np.uint64(8)) >> (place * np.uint64(8))) & np.uint64(0xFF)
    return place.astype(np.int64), ranks - before
