"""SnapKV (Li et al. 2024, arXiv 2404.14469): the end of the prompt selects from the prompt.

Attention of the last prompt queries, max-pooled along the prompt so that whole clues survive.
Differences: one selection per token, not per head. The paper compresses the prompt once and
keeps every generated token; here the budget holds for the whole request, so later evictions
take further prompt tokens by the same scores, and generated tokens, oldest first, only when no
unprotected prompt token is left.
"""

from typing import Any, ClassVar

import numpy as np

from vtoken.observation import ATTENTION_PREFILL
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class SnapKVPolicy(ScoredPolicy):
    """Evicts prompt tokens that the end of the prompt did not look at."""

    name = "snapkv"
    summary = "Keeps the prompt tokens that the last prompt queries attended to, with neighbours."
    paper = "arXiv:2404.14469"
    signals = frozenset({ATTENTION_PREFILL})
    args_schema: ClassVar[dict[str, Any]] = {
        "pool_radius": {
            "type": "integer",
            "minimum": 0,
            "maximum": 31,
            "default": 3,
            "description": "Neighbours on each side over which scores are max-pooled.",
        }
    }

    def score(self, view: LiveView) -> ScoreArray:
        """Pooled attention mass of the prefill window; infinite for generated tokens."""
        half = self.args["pool_radius"]
        dense = np.zeros(view.num_tokens + 2 * half)  # dead neighbours count as zero
        dense[view.live_ids + half] = view.signals[ATTENTION_PREFILL]
        windows = np.lib.stride_tricks.sliding_window_view(dense, 2 * half + 1)
        pooled = windows[view.live_ids].max(axis=1)
        return np.where(view.live_ids < view.num_prompt_tokens, pooled, np.inf)
