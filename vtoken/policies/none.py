"""Keep everything: measures the cost of the indirection alone (paper §4.4)."""

from vtoken.policies.base import EvictionPolicy, LiveView
from vtoken.types import BoolArray, IdArray


class NonePolicy(EvictionPolicy):
    """Never evicts a token."""

    name = "none"
    summary = "Keeps every token; only the token-table indirection is active."
    evicts = False

    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """No victims, whatever is asked."""
        return view.live_ids[:0]
