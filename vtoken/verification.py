"""Online checks of the invariants (``verify``), counted; what a violation leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vtoken import invariants
from vtoken.documents import Documents
from vtoken.errors import InvariantViolationError
from vtoken.occupancy import BlockOccupancy
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import VTokenStats
from vtoken.types import SlotArray

SAMPLED_VERIFY_INTERVAL = 16
"""With ``verify=sampled`` one batch in this many is hashed and checked."""


class Verification:
    """Checks what the document in force asks for.

    Attributes:
        on_violation: told of each violation, but under ``full``, where it is raised.
    """

    def __init__(
        self,
        documents: Documents,
        requests: Mapping[str, RequestKV],
        occupancy: BlockOccupancy,
        stats: VTokenStats,
    ) -> None:
        self.on_violation: Callable[[InvariantViolationError], None] = lambda error: None
        self._documents = documents
        self._requests = requests
        self._occupancy = occupancy
        self._stats = stats

    @property
    def _level(self) -> str:
        return self._documents.current.config.verify

    def covers(self, ticket: int) -> bool:
        """Whether this batch is checked online (``verify``)."""
        level = self._level
        return level == "full" or (level == "sampled" and ticket % SAMPLED_VERIFY_INTERVAL == 0)

    def check_conservation(self, req_id: str, num_tokens: int, before: str, after: str) -> bool:
        """I1 from the worker's digests, counted; whether it holds."""
        return self._holds("I1", invariants.check_conservation, req_id, num_tokens, before, after)

    def live_slots(self, req_ids: Iterable[str]) -> dict[str, SlotArray]:
        """What a step that was just registered must read, for :meth:`check_row`."""
        return {req_id: self._requests[req_id].table.live_slots() for req_id in req_ids}

    def check_row(self, req_id: str, expected: SlotArray, row: SlotArray) -> None:
        """I2 across processes: the forward read exactly the slots that the table named.

        Args:
            req_id: request.
            expected: of :meth:`live_slots` when the forward was scheduled: the table may have
                changed since, under asynchronous scheduling.
            row: as reported.
        """
        self._holds("I2", invariants.check_row, req_id, expected, row)

    def check_all(self) -> None:
        """Every invariant that can be read off the state, of every request.

        Raises:
            InvariantViolationError: one does not hold; carries the numbers.
        """
        for kv in self._requests.values():
            invariants.check_unique_mapping(kv)
        invariants.check_totals(self._occupancy, list(self._requests.values()))

    def approves(self, plan: RelocationPlan, num_computed: int) -> bool:
        """I4 of a plan that is about to be sent or committed, if its batch is to be checked."""
        kv = self._requests[plan.req_id]
        return not self.covers(plan.ticket) or self._holds(
            "I4", invariants.check_plan, kv, plan, num_computed
        )

    def check_mapping(self, kv: RequestKV) -> bool:
        """I2 of one table, counted; whether it holds."""
        return self._holds("I2", invariants.check_unique_mapping, kv)

    def _holds(self, invariant: str, check: Any, *args: Any) -> bool:
        """Run a check and count it; a violation is told, and under ``full`` raised."""
        self._stats.inc("invariant_checks_total", 1, invariant)
        try:
            check(*args)
        except InvariantViolationError as error:
            self._stats.inc("invariant_violations_total", 1, invariant)
            if self._level == "full":
                raise
            self.on_violation(error)
            return False
        return True
