"""R-KV (Cai et al. 2025, arXiv 2505.24133): important and not redundant.

Score ``w · I − (1 − w) · R``: I is the attention received, R how much the key resembles those
of the other live tokens, each normalised to sum 1 over the live tokens (R by softmax). Meant
for long reasoning outputs that repeat themselves. Differences: I is the accumulated mass of all
observed queries instead of a max-pooled window of the last 8; one score per token, not per
head; the paper exempts the latest of several similar tokens, here ``recent_tokens`` does.
"""

from typing import Any, ClassVar

import numpy as np

from vtoken.observation import ATTENTION_SUM, KEY_REDUNDANCY
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class RKVPolicy(ScoredPolicy):
    """Evicts tokens that are little attended to or say what others say."""

    name = "rkv"
    summary = "Weighs accumulated attention against the similarity of keys."
    paper = "arXiv:2505.24133"
    signals = frozenset({ATTENTION_SUM, KEY_REDUNDANCY})
    args_schema: ClassVar[dict[str, Any]] = {
        "importance_weight": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "default": 0.1,
            "description": "Weight w of attention; the rest is that of redundancy.",
        }
    }

    def score(self, view: LiveView) -> ScoreArray:
        """``w · I − (1 − w) · R``."""
        importance = view.signals[ATTENTION_SUM].astype(float)
        similar = np.exp(view.signals[KEY_REDUNDANCY].astype(float))
        scaled = importance / max(float(importance.sum()), 1e-30)
        weight = self.args["importance_weight"]
        scores: ScoreArray = weight * scaled - (1 - weight) * similar / similar.sum()
        return scores
