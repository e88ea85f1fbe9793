"""How numbers look on a page: digits, thousands, minus, and intervals."""

from __future__ import annotations

from tests.loadtest.published.results import Figure


def number(value: float, digits: int = 0, *, nearest: int = 1) -> str:
    """``1 610``, ``−0.01``, rounded as Python does.

    Args:
        value: any.
        digits: after the point.
        nearest: rounded to a multiple of it: 10 makes 1 612 to 1 610.
    """
    rounded = round(value / nearest) * nearest if nearest > 1 else value
    text = f"{rounded:,.{digits}f}"
    if not float(text.replace(",", "")):
        text = text.lstrip("-")  # no minus before a zero
    return text.replace(",", " ").replace("-", "−")


def interval(figure: Figure, digits: int = 0, *, nearest: int = 1) -> str:
    """`` (1.2 … 1.3)``; empty if there is none, or if both ends look the same."""
    if figure.low is None or figure.high is None:
        return ""
    low, high = (number(end, digits, nearest=nearest) for end in (figure.low, figure.high))
    return "" if low == high else f" ({low} … {high})"


def bold(text: str) -> str:
    """Its first number in bold: ``**9** (8 … 10)``."""
    head, space, rest = text.partition(" (")
    return f"**{head}**{space}{rest}"
