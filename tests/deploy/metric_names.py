"""Which series exist, by specification, by source and by scrape; and which nobody looks at."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from service.metrics import PREFIX, SERVICE_METRICS
from vtoken.stats import METRICS

_VLLM_KINDS = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}

HTTP_FAMILIES = {"http_requests_total": "counter"}
"""What is used of the HTTP library's metrics."""


def our_families() -> dict[str, str]:
    """Family name, as Prometheus sees it, to its kind."""
    specs = [*METRICS.values(), *SERVICE_METRICS]
    return {PREFIX + spec.name: spec.kind for spec in specs}


def vllm_families() -> dict[str, str]:
    """The same for the installed vLLM, read from its source without importing it."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    declared = _declared(ast.parse(source.read_text(encoding="utf-8")))
    return {
        name.removesuffix("_total") + "_total" if kind == "counter" else name: kind
        for name, kind in declared
    }


def families_in(exposition: str) -> dict[str, str]:
    """The same for what ``/metrics`` answers."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", exposition, re.MULTILINE))


def misplaced(
    families: Mapping[str, str], shown: set[str], not_shown: Mapping[str, str]
) -> list[str]:
    """What is wrong with the list of metrics that no dashboard shows, one sentence each.

    Args:
        families: what there is.
        shown: series that dashboards ask for.
        not_shown: the list, patterns with reasons.
    """
    wrong = []
    unused = set(not_shown)
    for name, kind in sorted(families.items()):
        patterns = {pattern for pattern in not_shown if fnmatchcase(name, pattern)}
        unused -= patterns
        is_shown = bool(series({name: kind}) & shown)
        if not is_shown and not patterns:
            wrong.append(f"{name} is new: put it on a dashboard, or on the list with a reason")
        if is_shown and patterns:
            wrong.append(f"{name} is on a dashboard, and on the list as {' and '.join(patterns)}")
    return wrong + [
        f"{pattern} is on the list, and nothing is called so" for pattern in sorted(unused)
    ]


def series(families: dict[str, str]) -> set[str]:
    """The names of the series that families of these kinds give."""
    names = set()
    for family, kind in families.items():
        if kind == "histogram":
            names |= {f"{family}_{part}" for part in ("bucket", "sum", "count")}
        elif kind == "counter":
            names.add(family.removesuffix("_total") + "_total")
        else:
            names.add(family)
    return names


def used_series(expressions: Iterable[str]) -> set[str]:
    """The metric names in PromQL expressions."""
    return {
        name
        for expr in expressions
        for name in re.findall(r"(?:vtoken_|vllm:|http_requests_)\w+", expr)
    }


def _declared(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = _VLLM_KINDS.get(node.func.attr)
            for keyword in node.keywords:
                if kind and keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value), kind
