"""The observed requests of one step, in parts that take a bounded amount of memory.

What observing takes grows with the padded width of what is looked at together, so a long request
must not stretch the rows of many short ones. Requests are therefore put together by length::

    lens     9 128k 7 8 …        part 1   7 8 9 …       padded to 9
                                 part 2   128k          alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]
Number = TypeVar("Number", int, IndexArray)


@dataclass(frozen=True, eq=False)
class ObservedRequests:
    """Observed requests of one step: slot row, live tokens, end of its queries in the batch."""

    rows: NDArray[np.int64]
    lens: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_queries: NDArray[np.int64]
    in_prefill: NDArray[np.bool_]

    def take(self, index: IndexArray) -> ObservedRequests:
        """Some of them."""
        return ObservedRequests(*(array[index] for array in vars(self).values()))

    def cut(self, most_queries: int) -> Iterator[ObservedRequests]:
        """The same with at most so many queries at once; in this order they add up to the same.

        All of these requests have equally many.
        """
        num_queries = int(self.num_queries[0])
        for start in range(0, num_queries, most_queries):
            end = min(start + most_queries, num_queries)
            # To a query the tokens that come after it do not exist.
            behind = num_queries - end
            yield dataclasses.replace(
                self,
                lens=self.lens - behind,
                ends=self.ends - behind,
                num_queries=np.full_like(self.num_queries, end - start),
            )


@dataclass(frozen=True)
class ColumnBytes:
    """What one column (a live token, or the padding of a shorter row) of one request takes.

    Attributes:
        fixed: bytes, however many queries are observed.
        per_query: bytes for each of them.
    """

    fixed: int
    per_query: int

    def of(self, num_queries: Number) -> Number:
        """Bytes of a column that so many queries look at."""
        return self.fixed + num_queries * self.per_query

    def most_queries(self, num_columns: int, limit: int) -> int:
        """How many queries may look at so many columns within ``limit`` bytes, at least 1."""
        return max(1, (limit // num_columns - self.fixed) // self.per_query)


def packed(lens: NDArray[np.int64], column_bytes: int, limit: int) -> Iterator[IndexArray]:
    """Put rows together, the shortest first, while their padded columns fit; a row at least.

    Args:
        lens: columns of each row.
        column_bytes: that a column takes.
        limit: most bytes of one part.

    Yields:
        Places in ``lens``, ascending; each is in one part.
    """
    order = np.argsort(lens, kind="stable")
    while len(order):
        padded = np.arange(1, len(order) + 1) * lens[order]
        num = max(1, int(padded.searchsorted(limit // column_bytes, side="right")))
        yield np.sort(order[:num])
        order = order[num:]


def parts_by_queries(
    requests: ObservedRequests, column_bytes: ColumnBytes, limit: int
) -> list[ObservedRequests]:
    """Requests with equally many observed queries together, the most queries last.

    A window that takes more than ``limit`` by itself is cut between its queries. Its pieces come
    first, in the order in which they must be accounted for. So a part is above ``limit`` only
    if one query over one row is.
    """
    too_much = requests.lens * column_bytes.of(requests.num_queries) > limit
    is_cut = too_much & (requests.num_queries > 1)
    parts: list[ObservedRequests] = []
    for i in np.flatnonzero(is_cut):
        most = column_bytes.most_queries(int(requests.lens[i]), limit)
        parts += requests.take(np.array([i])).cut(most)
    whole = requests.take(np.flatnonzero(~is_cut))
    for count in np.unique(whole.num_queries):
        some = whole.take(np.flatnonzero(whole.num_queries == count))
        together = packed(some.lens, column_bytes.of(int(count)), limit)
        parts += [some.take(index) for index in together]
    return parts
