"""Long texts: the Debian Reference, other documentation of the machine, or a generated text.

The first of these that can be had is used, and its name is recorded with the results: the
installed package ``debian-reference-en``, the same package downloaded with apt (not installed)
into the cache folder, texts under ``/usr/share/doc``, and a text made of a fixed vocabulary, which
is the same everywhere.
"""

from __future__ import annotations

import gzip
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.sharegpt import default_cache_dir

PACKAGE = "debian-reference-en"
MIN_CHARACTERS = 400_000

_REFERENCE = Path("usr/share/debian-reference/debian-reference.en.txt.gz")
_DOC = Path("/usr/share/doc")
_NUM_GENERATED_SENTENCES = 8000
_SUBJECTS = ("The scheduler", "A request", "The pool", "Every block", "The client", "A token")
_VERBS = ("reads", "keeps", "moves", "releases", "measures", "describes", "waits for", "follows")
_OBJECTS = ("the old table", "its last page", "a free slot", "the next step", "another queue")
_ENDINGS = ("in the morning", "without delay", "before it is full", "as the manual says", "twice")


@dataclass(frozen=True)
class Document:
    """A long text and where it comes from."""

    source: str
    text: str


def load_document(cache_dir: Path | None = None, *, only_generated: bool = False) -> Document:
    """The best long text that this machine can give; see the module docstring."""
    folder = cache_dir or default_cache_dir()
    sources: tuple[Callable[[], Document | None], ...] = (
        lambda: _reference(Path("/"), PACKAGE),
        lambda: _downloaded_reference(folder),
        lambda: system_documents(_DOC),
    )
    for source in () if only_generated else sources:
        document = source()
        if document is not None and len(document.text) >= MIN_CHARACTERS:
            return document
    return generated_document()


def generated_document(seed: int = 0) -> Document:
    """Sentences of a fixed vocabulary, no two neighbours alike; equal for equal seeds."""
    rng = random.Random(seed)
    return Document("generated text", " ".join(_sentences(rng)))


def system_documents(folder: Path) -> Document | None:
    """News and readme files of installed packages, in alphabetical order; ``None`` if too few."""
    texts = []
    for path in sorted([*folder.glob("*/NEWS*"), *folder.glob("*/README*")]):
        texts.append(_read(path) if path.is_file() else "")
    text = "\n\n".join(filter(None, texts))
    return Document("documentation of installed packages", text) if text else None


def excerpt(document: Document, num_characters: int, rng: random.Random) -> str:
    """A random piece of the text that begins after a line break or a space.

    Raises:
        ValueError: the text is too short.
    """
    room = len(document.text) - num_characters
    if room < 0:
        raise ValueError(f"{document.source} has {len(document.text)} characters only")
    start = rng.randrange(room + 1)
    break_at = max(document.text.rfind("\n", 0, start), document.text.rfind(" ", 0, start))
    return document.text[break_at + 1 : break_at + 1 + num_characters]


def _sentences(rng: random.Random) -> Iterator[str]:
    for number in range(_NUM_GENERATED_SENTENCES):
        words = (rng.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        yield f"{' '.join(words)}, which is rule {number}."


def _reference(root: Path, name: str) -> Document | None:
    path = root / _REFERENCE
    return Document(name, _read(path)) if path.exists() else None


def _downloaded_reference(cache_dir: Path) -> Document | None:
    """The package unpacked in the cache folder; ``None`` where apt cannot get it."""
    folder = cache_dir / PACKAGE
    if not (folder / _REFERENCE).exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            fetch = subprocess.run(
                ["apt-get", "download", PACKAGE], cwd=scratch, capture_output=True, check=False
            )
            packages = list(Path(scratch).glob("*.deb"))
            if fetch.returncode == 0 and packages:
                command = ["dpkg-deb", "-x", str(packages[0]), str(folder)]
                subprocess.run(command, check=False, capture_output=True)
    return _reference(folder, PACKAGE)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")
    except (OSError, EOFError):
        return ""
