"""What the policy document was: every change with its author, bounded in length.

It lives beside the token layer, in the one process that owns the document, so that every API
process tells the same story. It ends with the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.errors import ConfigError

ApplyTo = Literal["running", "new"]
APPLY_TO: tuple[ApplyTo, ...] = ("running", "new")

MAX_CHANGES = 100
"""Changes that are remembered, and versions that can be rolled back to."""
MAX_NOTE_CHARS = 200


@dataclass(frozen=True)
class ChangeInfo:
    """What is said about a change beside its values.

    Attributes:
        by: name of the key that authorised it, or what made it.
        action: ``start``, ``patch``, ``rollback``, or ``safety`` for one the engine made itself.
        apply_to: ``running``: running and new requests; ``new``: those that arrive from now on.
        note: of the author, for other people.
        rolled_back_to: the version whose values it restores.

    Raises:
        ConfigError: ``apply_to`` or ``note`` is out of bounds.
    """

    by: str = "unknown"
    action: str = "patch"
    apply_to: ApplyTo = "running"
    note: str | None = None
    rolled_back_to: int | None = None

    def __post_init__(self) -> None:
        """Check what callers choose."""
        if self.apply_to not in APPLY_TO:
            raise ConfigError("apply_to", self.apply_to, f"one of {', '.join(APPLY_TO)}")
        if self.note is not None and len(self.note) > MAX_NOTE_CHARS:
            raise ConfigError("note", self.note, f"at most {MAX_NOTE_CHARS} characters")


@dataclass(frozen=True)
class Change:
    """One version of the document and how it came to be.

    Attributes:
        version: that began with it.
        at: when, ISO 8601 in UTC.
        info: who and why.
        changes: live fields that differ from the version before: ``{name: {"from", "to"}}``.
        config: the whole configuration from then on.
    """

    version: int
    at: str
    info: ChangeInfo
    changes: dict[str, dict[str, Any]]
    config: VTokenConfig

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, without the whole configuration."""
        head = {"version": self.version, "at": self.at, **asdict(self.info)}
        return {**head, "changes": self.changes}


class History:
    """The last :data:`MAX_CHANGES` changes, the present one included."""

    def __init__(self, config: VTokenConfig) -> None:
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self.record(1, config, config, ChangeInfo(by="start", action="start"))

    def __iter__(self) -> Iterator[Change]:
        """The newest first."""
        return reversed(self._changes)

    def record(
        self, version: int, before: VTokenConfig, after: VTokenConfig, info: ChangeInfo
    ) -> Change:
        """Add the change that made ``version``; the oldest may be forgotten."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        change = Change(version, at, info, diff(before, after), after)
        self._changes.append(change)
        return change

    def find(self, version: int | None = None) -> Change:
        """The change that made ``version``; by default the one before the present.

        Raises:
            ConfigError: it is not remembered, or was never made.
        """
        oldest, newest = self._changes[0].version, self._changes[-1].version
        if version is None and oldest == newest:
            raise ConfigError("version", None, f"there is no version before {newest}")
        if version is None:
            return self._changes[-2]
        for change in self._changes:
            if change.version == version:
                return change
        raise ConfigError("version", version, f"a remembered version, {oldest} to {newest}")


def diff(before: VTokenConfig, after: VTokenConfig) -> dict[str, dict[str, Any]]:
    """Live fields that differ, ``{name: {"from", "to"}}``, in the order of the document."""
    old, new = before.to_dict(), after.to_dict()
    return {
        name: {"from": old[name], "to": new[name]}
        for name in old
        if name in LIVE_FIELDS and old[name] != new[name]
    }
