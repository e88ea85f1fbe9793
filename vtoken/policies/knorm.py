"""L2 norm of the key (Devoto et al. 2024, arXiv 2406.11430): small keys draw attention.

Needs no attention at all, only the keys in the cache. Differences: the paper scores each head
alone and leaves the first layers uncompressed; here one score per token, the mean norm over KV
heads of sampled layers, after rotary embedding (which does not change a norm).
"""

from vtoken.observation import KEY_NORM
from vtoken.policies.base import LiveView, ScoreArray, ScoredPolicy


class KNormPolicy(ScoredPolicy):
    """Evicts the tokens with the largest keys."""

    name = "knorm"
    summary = "Keeps tokens with small key norms; looks at no attention."
    paper = "arXiv:2406.11430"
    signals = frozenset({KEY_NORM})

    def score(self, view: LiveView) -> ScoreArray:
        """The norm, negated: large keys die first."""
        return -view.signals[KEY_NORM].astype(float)
