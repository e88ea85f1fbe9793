"""All tables that are rendered, by page of docs/.

A new result gets a table in four steps: put its JSON into ``docs/evaluation/``; add a description
to ``memory.py``, ``speed.py`` or ``quality.py`` (there are functions for overhead at another
context, closed and open loops, sweeps of clients, and damage to text); put
``<!-- table: NAME -->`` and ``<!-- end -->`` on lines of their own where it belongs; and run
``python -m tests.loadtest.published --write``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published import memory, performance, policies, quality, settings, speed
from tests.loadtest.published.summary import SUMMARY
from tests.loadtest.published.tables import Table

PAGES: dict[str, Sequence[Table]] = {
    "evaluation.md": [
        SUMMARY,
        *memory.TABLES,
        *speed.TABLES,
        *quality.TABLES,
        *settings.TABLES,
    ],
    "performance.md": performance.TABLES,
    "policies.md": policies.TABLES,
}

HAND_WRITTEN = {
    "evaluation.md": ["| scenario | question | paper |", "  | command | two quiet cores |"],
    "performance.md": [
        "| | `naive` | `lazy` | lazy / naive |",
        "| level | step CPU, ratio to off (middle half) | share of it spent hashing |",
        "| sharing degree | 1 | 2 | 4 | 8 |",
        "| exactly fitting pool, sharing degree | 1 | 2 | 4 | 8 |",
    ],
    "policies.md": ["| policy | keeps | looks at | differs from its paper in |"],
}
"""Heads of the tables that are not."""
