"""Which series exist: ours from the specifications, vLLM's from the source of its metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from service.metrics import PREFIX, SERVICE_METRICS
from vtoken.stats import METRICS

_VLLM_KINDS = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}


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
    return dict(_declared(ast.parse(source.read_text(encoding="utf-8"))))


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
    return {name for expr in expressions for name in re.findall(r"(?:vtoken_|vllm:)\w+", expr)}


def _declared(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = _VLLM_KINDS.get(node.func.attr)
            for keyword in node.keywords:
                if kind and keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value), kind
