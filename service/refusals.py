"""Counts the requests that the server turned away or ended early, by the reason.

A reason that is a setting has its name, so that whoever sees the count knows what to change.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.tally import Tally

REASONS = (
    "draining",
    "max_requests_per_key",
    "max_queue_seconds",
    "max_body_bytes",
    "max_prompt_tokens",
    "max_output_tokens",
    "request_timeout_seconds",
    "cut_off",
)
"""Every one; the last two end a request that was accepted, the others refuse it."""


class Refusals:
    """The event loop's thread counts.

    Args:
        counts: of every reason, where other processes count, too.
    """

    def __init__(self, counts: Mapping[str, Tally] | None = None) -> None:
        self._counts = counts or {reason: Tally() for reason in REASONS}

    def count(self, reason: str) -> None:
        """One more; ``reason`` is of :data:`REASONS`."""
        assert reason in REASONS, reason
        self._counts[reason].add()

    def totals(self) -> dict[str, int]:
        """Of every reason, since the start."""
        return {reason: self._counts[reason].total() for reason in REASONS}
