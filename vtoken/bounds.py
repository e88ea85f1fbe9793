"""Which numbers a setting may have: said once, beside the field, for checks and for schemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; an open end is itself left out."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether it is a number inside; NaN is not, and neither is a boolean."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def text(self, name: str) -> str:
        """``0 <= theta_f < 1``."""
        below_open, above_open = ("<" if is_open else "<=" for is_open in self._ends())
        return f"{self.low} {below_open} {name} {above_open} {self.high}"

    def json_schema(self) -> dict[str, Any]:
        """The keywords of JSON Schema that say the same."""
        low_open, high_open = self._ends()
        return {
            "exclusiveMinimum" if low_open else "minimum": self.low,
            "exclusiveMaximum" if high_open else "maximum": self.high,
        }

    def _ends(self) -> tuple[bool, bool]:
        return self.low_open, self.high_open


RATIO = Range(0, 1)
BELOW_ONE = Range(0, 1, high_open=True)
ABOVE_ZERO = Range(0, 1, low_open=True)
UP_TO_A_MILLION = Range(1, 1_000_000)
