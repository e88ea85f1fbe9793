"""TOVA (Oren et al. 2024, arXiv 2401.06104): the last query decides.

Differences: the paper evicts one token per step and layer; here one query decides over all that
is due since the last eviction, by the mean over heads of sampled layers, and the newest tokens
are protected.
"""

from vtoken.observation import ATTENTION_LAST
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class TOVAPolicy(ScoredPolicy):
    """Evicts the tokens to which the last query paid the least attention."""

    name = "tova"
    summary = "Keeps the tokens to which the last query paid the most attention."
    paper = "arXiv:2401.06104"
    signals = frozenset({ATTENTION_LAST})

    def score(self, view: LiveView) -> ScoreArray:
        """Attention mass of the last query."""
        return view.signals[ATTENTION_LAST].astype(float)
