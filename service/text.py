"""Text that clients made up, fit to be answered, logged and shown."""

from __future__ import annotations


def encodable(text: str) -> str:
    """For an answer: halves of surrogate pairs, which JSON lets clients send, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """For one line of a log or a terminal: line ends, and whatever moves a cursor, as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
