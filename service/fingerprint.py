"""Whether a path leads to another file than before, or to the same one written anew."""

from __future__ import annotations

from pathlib import Path


def fingerprint(path: str | Path) -> tuple[int, ...]:
    """Equal as long as the file that the path leads to was neither replaced nor written; empty
    while there is none.

    Links are followed: Kubernetes renews a mounted Secret by leading one of them elsewhere.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)
