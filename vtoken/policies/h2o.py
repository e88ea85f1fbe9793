"""H2O (Zhang et al. 2023, arXiv 2306.14048): heavy hitters plus a recent window.

Importance is the attention that a token has received so far, summed over queries. Differences:
the paper scores each head alone and every query; here one score per token, the mean over heads
of a few sampled layers and of sampled queries, because a slot belongs to all heads. The recent
window is ``recent_tokens`` instead of half the budget.
"""

from vtoken.observation import ATTENTION_SUM
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class H2OPolicy(ScoredPolicy):
    """Evicts the tokens with the least accumulated attention."""

    name = "h2o"
    summary = "Heavy hitters: keeps tokens with the most accumulated attention."
    paper = "arXiv:2306.14048"
    signals = frozenset({ATTENTION_SUM})

    def score(self, view: LiveView) -> ScoreArray:
        """Accumulated attention mass."""
        return view.signals[ATTENTION_SUM].astype(float)
