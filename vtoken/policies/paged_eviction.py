"""PagedEviction (Chitty-Venkata et al. 2025, arXiv 2509.04377): whole pages, no relocation.

A page's importance is the mean over its tokens of ‖V‖ / ‖K‖; the least important pages go as a
whole, so blocks empty without moving a token: the rival of relocation. Faithful: the proxy, its
mean per page, one page per page of new tokens (``evict_interval_tokens`` = block size).
Differences: the paper prunes the prompt token by token before it forms pages; here prompt
pages go whole too. Tokens over the budget that do not fill a page stay until they do.
"""

import numpy as np

from vtoken.observation import VALUE_KEY_RATIO
from vtoken.policies.base import EvictionPolicy, LiveView, lowest
from vtoken.types import BoolArray, IdArray


class PagedEvictionPolicy(EvictionPolicy):
    """Evicts the full pages of lowest mean importance."""

    name = "paged_eviction"
    summary = "Whole blocks by mean ‖V‖/‖K‖ of their tokens; never leaves a hole."
    paper = "arXiv:2509.04377"
    signals = frozenset({VALUE_KEY_RATIO})
    whole_pages = True

    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """All tokens of ``num_victims / page_size`` pages; of equals the older."""
        candidates = view.live_ids[~protected].reshape(-1, view.page_size)
        means = view.signals[VALUE_KEY_RATIO][~protected].reshape(candidates.shape).mean(axis=1)
        num_pages = num_victims // view.page_size
        pages = lowest(means.astype(float), num_pages, np.zeros(len(means), np.bool_))
        return candidates[pages].reshape(-1)
