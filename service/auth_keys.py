"""Named keys from files and the environment, read again while the server runs.

A key file has one key per line, ``name: key`` or a bare key, with blank lines and ``#`` comments;
a key folder has one file per key, named after it, as Kubernetes mounts a secret. Several keys may
have one name, so that a key can be replaced without a gap. Keys are kept as digests only.

Files are looked at when a key is asked for, at most once a second. What cannot be read, or holds
no key any more, is logged as error and the last good keys stay: a half-written file locks nobody
out, and taking away every key needs a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from service.fingerprint import fingerprint
from vtoken.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 1.0
MAX_FILE_BYTES = 256 * 1024
MAX_NAME_CHARS = 64

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):\s+(\S.*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeySources:
    """Where the keys of one kind come from.

    Attributes:
        kind: ``admin`` or ``api``; bare keys are named after it.
        given: ``(name, key)`` that need no file; they stay as they are.
        file: with one key per line.
        folder: with one file per key.
    """

    kind: str
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    file: Path | None = None
    folder: Path | None = None

    @property
    def any(self) -> bool:
        """Whether a source is named at all."""
        return bool(self.given or self.file or self.folder)

    def read(self) -> list[tuple[str, str]]:
        """All keys as ``(name, key)``, those of files as they are now.

        Raises:
            ConfigError: a file or folder cannot be read or holds no key.
        """
        found = list(self.given)
        if self.file is not None:
            found += _read_file(self.file, self.kind)
        if self.folder is not None:
            found += _read_folder(self.folder, self.kind)
        return found

    def fingerprint(self) -> object:
        """Equal as long as no file was written, replaced, added or taken away."""
        paths = [self.file] if self.file is not None else []
        if self.folder is not None:
            paths += _entries(self.folder)
        return [(str(path), *fingerprint(path)) for path in paths]


class KeyRing:
    """Knows the name of each key, and compares in constant time."""

    def __init__(self, sources: KeySources, clock: Callable[[], float] = time.monotonic) -> None:
        """Read all sources.

        Raises:
            ConfigError: a file or folder cannot be read or holds no key.
        """
        self._sources = sources
        self._clock = clock
        self._fingerprint = sources.fingerprint()
        self._names = _digests(sources.read())
        self._looked_at = clock()

    @classmethod
    def of(cls, kind: str, keys: Mapping[str, str]) -> KeyRing:
        """A ring of keys by name, without files."""
        return cls(KeySources(kind, given=tuple(keys.items())))

    @property
    def is_empty(self) -> bool:
        """Whether no key is configured."""
        return not self._names

    def name_of(self, key: str) -> str | None:
        """The name of a key; ``None`` if nobody has it. Takes as long for one as for another."""
        self._refresh()
        digest, found = _digest(key), None
        for other, name in self._names:  # no early exit: time must not tell which key is near
            if hmac.compare_digest(digest, other):
                found = name
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < CHECK_INTERVAL_SECONDS:
            return
        self._looked_at = now
        try:
            fingerprint = self._sources.fingerprint()
            if fingerprint == self._fingerprint:
                return
            # Remembered also if reading fails: each bad state is logged once.
            self._fingerprint = fingerprint
            names = _digests(self._sources.read())
        except (ConfigError, OSError) as error:
            logger.error("%s keys could not be read again, the last stay: %s", self.kind, error)
            return
        before, self._names = self._names, names
        if before != names:
            logger.info("%s keys were read again: %s", self.kind, ", ".join(self.names) or "none")

    @property
    def kind(self) -> str:
        """``admin`` or ``api``."""
        return self._sources.kind

    @property
    def names(self) -> list[str]:
        """Of all keys, ascending."""
        return sorted({name for _, name in self._names})


def bare_key(setting: str, text: str) -> str:
    """A key as clients can send it: without the blanks around it, as of a Secret made from a file.

    Args:
        setting: the variable or flag that holds it.
        text: not empty.

    Raises:
        ConfigError: it is blank; taken for no key, it would leave open what it was to close.
    """
    key = text.strip()
    if not key:
        raise ConfigError(setting, text, "a key that is not blank; leave it out for none")
    return key


def parse_lines(text: str, kind: str) -> list[tuple[str, str]]:
    """``(name, key)`` of each line; bare keys are ``kind-1``, ``kind-2``, … by place."""
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    found = []
    for number, line in enumerate(keys, 1):
        named = _NAMED.fullmatch(line)
        found.append((named[1], named[2]) if named else (f"{kind}-{number}", line))
    return found


def _read_file(path: Path, kind: str) -> list[tuple[str, str]]:
    keys = parse_lines(_read_text(path, kind, "KEY_FILE"), kind)
    if not keys:
        raise ConfigError(_variable(kind, "KEY_FILE"), str(path), "a file with at least one key")
    return keys


def _read_folder(folder: Path, kind: str) -> list[tuple[str, str]]:
    variable, keys = _variable(kind, "KEYS_DIR"), []
    for path in _entries(folder):
        if not _NAME.fullmatch(path.name):
            raise ConfigError(
                variable, str(path), f"file names of at most {MAX_NAME_CHARS} of A-Za-z0-9._-"
            )
        lines = parse_lines(_read_text(path, kind, "KEYS_DIR"), kind)
        if len(lines) != 1:
            raise ConfigError(variable, str(path), "files with one key each, in one line")
        keys.append((path.name, lines[0][1]))
    if not keys:
        raise ConfigError(variable, str(folder), "a folder with one file per key")
    return keys


def _entries(folder: Path) -> list[Path]:
    """The key files of a folder; Kubernetes keeps its own under names with a leading dot."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.is_file())
    except OSError:
        return []


def _read_text(path: Path, kind: str, setting: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        rule = f"a readable text file with one key per line ({error})"
        raise ConfigError(_variable(kind, setting), str(path), rule) from error


def _variable(kind: str, setting: str) -> str:
    return f"VTOKEN_{kind.upper()}_{setting}"


def _digests(keys: Iterable[tuple[str, str]]) -> list[tuple[bytes, str]]:
    return [(_digest(key), name) for name, key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
