"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks plus a recent window.

The paper gives surviving tokens new positions inside the cache; here positions stay logical,
so attention sees the true distance to the sinks.
"""

from vtoken.policies.base import EvictionPolicy, LiveView
from vtoken.types import BoolArray, IdArray


class StreamingLLMPolicy(EvictionPolicy):
    """Evicts the oldest tokens behind the sinks: the budget is sinks plus newest tokens."""

    name = "streaming_llm"
    summary = "Attention sinks plus the most recent tokens; the oldest others are evicted."
    paper = "arXiv:2309.17453"

    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """The ``num_victims`` oldest unprotected tokens."""
        return view.live_ids[~protected][:num_victims]
