"""The scenarios: each a module with ``run(bench) -> Outcome``, and ``PLOTS`` for its pictures."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from loadtest.bench import Bench
from loadtest.outcome import Outcome

NAMES: tuple[str, ...] = (
    "waste",
    "paired",
    "sla",
    "frontier",
    "overhead",
    "sensitivity",
    "prefix",
    "quality",
    "bookkeeping",
)

Run = Callable[[Bench], Awaitable[Outcome]]


def load(name: str) -> Any:
    """The module of a scenario: its ``run`` and ``PLOTS``.

    Raises:
        KeyError: there is no such scenario.
    """
    if name not in NAMES:
        raise KeyError(f"no scenario {name!r}: {', '.join(NAMES)}")
    return importlib.import_module(f"loadtest.scenarios.{name}")
