"""The policy document in force, and older ones that some requests keep until they end.

A change reaches running requests, or only those that arrive from then on. For the second kind
every request carries the *generation* in which it arrived, a number that grows with each such
change; the requests of one generation follow the same document.

What concerns the pool as a whole (:data:`POOL_FIELDS`) is always read from the document in force.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vtoken.config import VTokenConfig
from vtoken.policies.base import EvictionPolicy
from vtoken.policies.registry import make_policy

POOL_FIELDS: frozenset[str] = frozenset(
    {
        "mode",
        "headroom_blocks",
        "verify",
        "theta_f",
        "theta_f_mode",
        "theta_f_min",
        "theta_f_max",
        "low_watermark_ratio",
        "max_source_blocks",
        "relocate_shared",
        "relocate_into_cached",
        "check_interval_steps",
    }
)
"""Live fields that no single request can keep: a change of them reaches everybody at once."""


@dataclass(frozen=True, eq=False)
class Document:
    """One version of the policy document.

    Attributes:
        version: as in the ETag.
        config: every setting.
        policy: made from it.
    """

    version: int
    config: VTokenConfig
    policy: EvictionPolicy


class Documents:
    """Which document a request follows."""

    def __init__(self, config: VTokenConfig) -> None:
        """Start with version 1.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        self.current = Document(1, config, make_policy(config))
        self.generation = 0
        # Ascending: requests up to this generation, and after the one before, keep this document.
        self._kept: list[tuple[int, Document]] = []

    def of(self, generation: int) -> Document:
        """What requests of this generation follow."""
        for last, document in self._kept:
            if generation <= last:
                return document
        return self.current

    def is_kept(self, generation: int) -> bool:
        """Whether requests of this generation keep a document that is no longer in force."""
        return bool(self._kept) and generation <= self._kept[-1][0]

    def in_use(self) -> list[Document]:
        """The one in force and those that are kept."""
        return [self.current, *(document for _, document in self._kept)]

    def make(self, config: VTokenConfig) -> Document:
        """The next version, not yet in force.

        Raises:
            ConfigError: the policy or its arguments are unknown.
        """
        return Document(self.current.version + 1, config, make_policy(config))

    def install(self, document: Document, *, for_new_only: bool = False) -> None:
        """Put a document in force.

        Args:
            document: the next version.
            for_new_only: requests that have arrived keep what they follow; else all of them
                follow the new one, those of an older generation included.
        """
        if for_new_only:
            self._kept.append((self.generation, self.current))
            self.generation += 1
        else:
            self._kept.clear()
        self.current = document

    def release(self, generations: Collection[int]) -> None:
        """Forget documents that none of these generations, all that have requests, follows."""
        followed = {id(self.of(generation)) for generation in generations}
        self._kept = [kept for kept in self._kept if id(kept[1]) in followed]
