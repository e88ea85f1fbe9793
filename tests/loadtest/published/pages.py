"""All tables that are rendered, by page of docs/."""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published import memory, quality, speed
from tests.loadtest.published.summary import SUMMARY
from tests.loadtest.published.tables import Table

PAGES: dict[str, Sequence[Table]] = {
    "evaluation.md": [SUMMARY, *memory.TABLES, *speed.TABLES, *quality.TABLES],
}

HAND_WRITTEN = {
    "evaluation.md": ["| scenario | question | paper |", "  | command | two quiet cores |"],
}
"""Heads of the tables that are not."""
