"""Scissorhands (Liu et al. 2023, arXiv 2305.17118): importance persists.

A token was important to a query if its attention exceeded the mean ``1 / live tokens``; the
tokens that were important most rarely in the history window are dropped. Differences: one count
per token over heads and sampled layers, not one per head; the window counts observed queries,
at most 64, and slides by one query instead of starting anew at each compression.
"""

from typing import Any, ClassVar

import numpy as np

from vtoken.observation import ATTENTION_HISTORY
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class ScissorhandsPolicy(ScoredPolicy):
    """Evicts the tokens that were rarely important of late."""

    name = "scissorhands"
    summary = "Persistence of importance: keeps tokens that exceeded the mean attention most often."
    paper = "arXiv:2305.17118"
    signals = frozenset({ATTENTION_HISTORY})
    args_schema: ClassVar[dict[str, Any]] = {
        "history_window": {
            "type": "integer",
            "minimum": 1,
            "maximum": 64,
            "default": 64,
            "description": "Observed queries that count.",
        }
    }

    def score(self, view: LiveView) -> ScoreArray:
        """Observations in the window in which the token exceeded the mean."""
        mask = np.uint64(2 ** self.args["history_window"] - 1)
        counts: ScoreArray = np.bitwise_count(view.signals[ATTENTION_HISTORY] & mask).astype(float)
        return counts
