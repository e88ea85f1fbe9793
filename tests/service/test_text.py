"""What clients made up, fit to be shown."""

from __future__ import annotations

import pytest

from service.text import encodable, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b é 水 🙂", "a b é 水 🙂"),
        ("a\nb\r\x1b[2J\x00\x7f", r"a\nb\r\x1b[2J\x00\x7f"),
        ("\u2028\u202e\ud800", r"\u2028\u202e\ud800"),
        ("", ""),
    ],
)
def test_printable_is_one_line_that_moves_no_cursor(text: str, shown: str) -> None:
    """Letters of every script stay."""
    assert printable(text) == shown
    assert printable(text).isprintable()


@pytest.mark.parametrize("text", ["é\n🙂", "\ud800x", "\udfff"])
def test_encodable_can_be_sent(text: str) -> None:
    """Whole characters stay as they are."""
    assert encodable(text).encode()
    assert encodable(text) == text or "\\ud" in encodable(text)
