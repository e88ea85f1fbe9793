"""Objects in which a name stands once: of two members, JSON's and YAML's readers take the last, and
the other is lost without a word."""

from __future__ import annotations

from typing import Any

import yaml


class RepeatedError(ValueError):
    """A name stands twice in one object.

    Attributes:
        name: which.
        value: the second one's.
    """

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value
        super().__init__(f"{name!r} is given twice")


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; for ``json.loads(…, object_pairs_hook=members)``.

    Raises:
        RepeatedError: a name stands twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RepeatedError(name, value)
        found[name] = value
    return found


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which raises :class:`RepeatedError` where a name stands twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML's. What ``<<`` merges in comes later, and may be overridden, as there."""
        node = super().compose_mapping_node(anchor)
        names = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise RepeatedError(name[1], None)
        return node
