"""The file that the quality benchmarks write: losses per task, arm and ratio."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Key = tuple[str, str, float]
"""Task, arm, and share of the tokens that is kept."""


class Losses:
    """Losses per key, written to a file as they come.

    Args:
        path: of the file.
        arm: what the file calls the second part of a key.
    """

    def __init__(self, path: Path, arm: str) -> None:
        self._path, self._names = path, ("task", arm, "keep_ratio")
        self._sums: dict[Key, list[float]] = defaultdict(list)  # one per case
        self._num_tokens: dict[Key, list[int]] = defaultdict(list)
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, key: Key, losses: ArrayLike) -> None:
        """Losses ``[tokens]`` of one case."""
        values = np.asarray(losses, np.float64)
        self._sums[key].append(round(float(values.sum()), 3))
        self._num_tokens[key].append(len(values))

    def write(self, settings: dict[str, Any]) -> None:
        """One row per line."""
        rows = [json.dumps(self._row(key), separators=(",", ":")) for key in sorted(self._sums)]
        head = json.dumps(settings)
        self._path.write_text(f'{{"settings":{head},"rows":[\n' + ",\n".join(rows) + "\n]}\n")

    def resume(self, settings: dict[str, Any]) -> int:
        """Take over what the file holds; the number of cases of the arm ``none`` in it.

        Raises:
            ValueError: the file was made with other settings.
        """
        found = json.loads(self._path.read_text())
        if found["settings"] != json.loads(json.dumps(settings)):
            raise ValueError(f"{self._path} has {found['settings']}, not {settings}")
        for row in found["rows"]:
            task, arm, ratio = (row[name] for name in self._names)
            self._sums[task, arm, ratio] = row["case_nll"]
            self._num_tokens[task, arm, ratio] = row["case_tokens"]
        return sum(len(n) for (_, arm, _), n in self._sums.items() if arm == "none")

    def drop(self, arms: Collection[str]) -> None:
        """Forget what was measured of these arms."""
        for losses in (self._sums, self._num_tokens):
            for key in [key for key in losses if key[1] in arms]:
                del losses[key]

    def _row(self, key: Key) -> dict[str, Any]:
        """The mean per token, and per case, in order: sum of losses and scored tokens."""
        sums, num_tokens = self._sums[key], self._num_tokens[key]
        return {
            **dict(zip(self._names, key, strict=True)),
            "nll": round(sum(sums) / sum(num_tokens), 4),
            "num_tokens": sum(num_tokens),
            "num_cases": len(sums),
            "case_nll": sums,
            "case_tokens": num_tokens,
        }
