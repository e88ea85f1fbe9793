"""What Grafana makes of a dashboard's variables while All is selected, on a real Prometheus.

As its Prometheus data source does: the values that the variable's query finds, each escaped for a
regular expression within a string, as one group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.deploy.prometheus import Prometheus

_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
_QUERY_RESULT = re.compile(r"query_result\((.+)\)")
_SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}]")


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each ``$name`` replaced by its value."""
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def all_selected(
    variables: list[dict[str, Any]],
    values: Mapping[str, str],
    prometheus: Prometheus,
    start: float,
    end: float,
) -> dict[str, str]:
    """``values`` with those of the query variables added, each with All selected.

    Args:
        variables: of the dashboard's document, a variable after those it depends on.
        values: of the others, by ``$name``.
        prometheus: is asked for the options.
        start: of the dashboard's time, in seconds, as is ``end``.
        end: see ``start``.
    """
    found = dict(values)
    for variable in variables:
        if variable["type"] == "query":
            query = filled(variable["query"]["query"], found)
            options = _options(query, variable["regex"], prometheus, start, end)
            found[f"${variable['name']}"] = variable.get("allValue") or expanded(options)
    return found


def expanded(options: list[str]) -> str:
    """What stands in an expression for all of a variable's options."""
    escaped = [_SPECIAL.sub(lambda match: "\\\\" + match[0], option) for option in options]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _options(query: str, regex: str, prometheus: Prometheus, start: float, end: float) -> list[str]:
    if label_values := _LABEL_VALUES.fullmatch(query):
        selector, label = label_values.groups()
        asked = {"match[]": selector, "start": start, "end": end}
        return list(prometheus.get(f"label/{label}/values", **asked))
    query_result = _QUERY_RESULT.fullmatch(query)
    assert query_result, query
    series = prometheus.get("query", query=query_result[1], time=end)["result"]
    texts = [",".join(f'{k}="{v}"' for k, v in one["metric"].items()) for one in series]
    return [match[1] for text in texts if (match := re.search(regex.strip("/"), f"{{{text}}} 1"))]
