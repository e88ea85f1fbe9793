"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks plus a recent window.

The paper gives surviving tokens new positions inside the cache; here positions stay logical,
so attention sees the true distance to the sinks.
"""

import numpy as np

from vtoken.policies.ranks import RankArray, RankPolicy, RankQuestion
from vtoken.table_store import ragged


class StreamingLLMPolicy(RankPolicy):
    """Evicts the oldest tokens behind the sinks: the budget is sinks plus newest tokens."""

    name = "streaming_llm"
    summary = "Attention sinks plus the most recent tokens; the oldest others are evicted."
    paper = "arXiv:2309.17453"

    def select_ranks(self, asked: RankQuestion) -> RankArray:
        """The oldest tokens that may go."""
        return ragged(np.zeros_like(asked.num_victims), asked.num_victims)
