"""Changes of the policy document while requests run: checked, put in force, remembered."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.documents import Document
from vtoken.errors import ConfigError, InvariantViolationError
from vtoken.eviction import Evictor
from vtoken.eviction_choice import first_eviction_at
from vtoken.history import MAX_NOTE_CHARS, ChangeInfo, History
from vtoken.observation import ATTENTION_SIGNALS, PREFILL_SIGNALS
from vtoken.ports import BlockPoolPort
from vtoken.preview import preview, warnings
from vtoken.reclamation import ReclamationManager
from vtoken.request_kv import RequestKV
from vtoken.stats import VTokenStats

logger = logging.getLogger(__name__)

UNKNOWN = ChangeInfo()
"""Of changes that nobody signed."""


class PolicyControl:
    """The one place that puts another document in force.

    Attributes:
        history: every change.
        relocation_disabled: the violation that stopped relocation, or None.
        on_change: called when another document is in force, before running requests follow it.
        engine_check: raises ConfigError for what the engine around the token layer cannot do; asked
            before every change.
    """

    def __init__(
        self,
        evictor: Evictor,
        reclamation: ReclamationManager,
        requests: Mapping[str, RequestKV],
        pool: BlockPoolPort,
        stats: VTokenStats,
    ) -> None:
        """Start with the document that the evictor has.

        Raises:
            ConfigError: it does not fit to the pool.
        """
        self.on_change: Callable[[], None] = lambda: None
        self.engine_check: Callable[[VTokenConfig], None] = lambda config: None
        self.relocation_disabled: str | None = None
        self._evictor = evictor
        self._reclamation = reclamation
        self._requests = requests
        self._pool = pool
        self._stats = stats
        self._check_pool(self._config)
        self.history = History(self._config)

    @property
    def _config(self) -> VTokenConfig:
        return self._evictor.documents.current.config

    def patch(self, changes: Mapping[str, Any], info: ChangeInfo = UNKNOWN) -> VTokenConfig:
        """Change live settings by a merge patch; see :meth:`change`."""
        return self.change(self._config.patched(changes), info)

    def change(
        self, config: VTokenConfig, info: ChangeInfo = UNKNOWN, version: int | None = None
    ) -> VTokenConfig:
        """Put another document in force, and remember that; ``version`` may skip some numbers.

        Running requests are due at once under it, unless ``info`` says that it is for new ones
        only: then requests keep what they follow until they end, but for settings of the pool.
        A request with its own policy and budget is not due: only the rest of the settings, such
        as ``recent_tokens``, is new to it, from its next eviction on.

        Raises:
            ConfigError: a field is out of bounds; nothing was changed.
        """
        document = self.check(config)
        if version is not None:
            document = dataclasses.replace(document, version=max(version, document.version))
        before = self._config
        signals = {kv.req_id: self._evictor.policy_of(kv).signals for kv in self._requests.values()}
        self._evictor.install(document, for_new_only=info.apply_to == "new")
        self._reclamation.reconfigure(config)
        if config.relocates:
            self.relocation_disabled = None
        self.history.record(document.version, before, config, info)
        self._stats.inc("policy_changes_total")
        self.on_change()
        for kv in self._requests.values():
            if not self._evictor.documents.is_kept(kv.generation):
                self._follow(kv, signals[kv.req_id])
        return config

    def check(self, config: VTokenConfig) -> Document:
        """The document that :meth:`change` would put in force; changes nothing.

        Raises:
            ConfigError: the policy is unknown, or pool or engine cannot do it.
        """
        self._check_pool(config)
        self.engine_check(config)
        return self._evictor.documents.make(config)

    def preview(self, config: VTokenConfig, info: ChangeInfo = UNKNOWN) -> dict[str, Any]:
        """What :meth:`change` would do; changes nothing. See :mod:`vtoken.preview`.

        Raises:
            ConfigError: as :meth:`change`.
        """
        found = preview(self._evictor, self._requests.values(), self.check(config), info)
        return {**found, "warnings": self.warnings(config, info)}

    def warnings(self, config: VTokenConfig, info: ChangeInfo = UNKNOWN) -> list[str]:
        """What a person should know about :meth:`change`, in sentences; changes nothing.

        Raises:
            ConfigError: as :meth:`change`.
        """
        document = self.check(config)
        found = warnings(self._evictor, list(self._requests.values()), document, info)
        if self.relocation_disabled is not None and config.relocates:
            reason = self.relocation_disabled
            found.append(f"relocation: a violation stopped it, and mode lazy starts it: {reason}")
        return found

    def _follow(self, kv: RequestKV, signals_before: frozenset[str]) -> None:
        """Make the request due under a document that is new to it."""
        if kv.options.policy_key is not None and kv.options.has_own_budget:
            return
        config = self._evictor.document_of(kv).config
        kv.next_evict_at = first_eviction_at(config, kv.prefill_end)
        missing = (self._evictor.policy_of(kv).signals - signals_before) & ATTENTION_SIGNALS
        if missing and kv.table.num_tokens >= kv.prefill_end:
            # Scores of the old policy's making, or none: observe for one interval first.
            self._evictor.postpone(kv, kv.table.num_tokens)
            kv.window_missed = bool(missing & PREFILL_SIGNALS)

    @property
    def keeps_documents(self) -> bool:
        """Whether some may follow another document than the one in force."""
        return len(self._evictor.documents.in_use()) > 1

    def release_documents(self, generations: Collection[int]) -> None:
        """Forget kept documents that nobody follows any more.

        Args:
            generations: of all requests that have arrived and not ended, waiting ones included.
        """
        self._evictor.documents.release(generations)

    def stop_relocation(self, error: InvariantViolationError) -> None:
        """Serve on in mode naive: whatever is wrong, blocks that never move cannot get worse."""
        if self.relocation_disabled is not None:
            return
        self.relocation_disabled = str(error)
        logger.error(
            "relocation is stopped, serving goes on in mode naive until mode is set again: %s",
            error,
        )
        before = self._evictor.documents.current
        config = dataclasses.replace(before.config, mode="naive")
        # Every request follows, as the mode is the pool's; nobody's evictions change.
        self._evictor.documents.current = Document(before.version + 1, config, before.policy)
        self._reclamation.reconfigure(config)
        info = ChangeInfo(by="vtoken", action="safety", note=str(error)[:MAX_NOTE_CHARS])
        self.history.record(self._evictor.documents.current.version, before.config, config, info)

    def _check_pool(self, config: VTokenConfig) -> None:
        """Refuse what this pool cannot hold."""
        total, size = self._pool.num_total_blocks, self._pool.block_size
        if config.headroom_blocks >= total:
            bound = f"headroom_blocks < {total}, the blocks of the pool"
            raise ConfigError("headroom_blocks", config.headroom_blocks, bound)
        cap, always_kept = config.max_blocks_per_request, config.sink_tokens + config.recent_tokens
        if cap is not None and (cap - 1) * size <= always_kept:
            bound = (
                f"(max_blocks_per_request - 1) * {size} > sink_tokens + recent_tokens "
                f"= {always_kept}"
            )
            raise ConfigError("max_blocks_per_request", cap, bound)
