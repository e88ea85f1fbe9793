"""Random eviction: the paper's stress test, since it scatters survivors over all blocks."""

import numpy as np

from vtoken.policies.base import EvictionPolicy, LiveView
from vtoken.types import BoolArray, IdArray


class RandomPolicy(EvictionPolicy):
    """Evicts uniformly among unprotected tokens, reproducibly for a seed and a prompt."""

    name = "random"
    summary = "Uniformly random victims among unprotected tokens (seeded)."

    def select_victims(self, view: LiveView, num_victims: int, protected: BoolArray) -> IdArray:
        """A uniform draw without replacement; depends on seed, prompt and length only."""
        rng = np.random.default_rng([self.seed, view.request_seed, view.num_tokens])
        candidates = np.flatnonzero(~protected)
        chosen = candidates[rng.choice(len(candidates), num_victims, replace=False, shuffle=False)]
        return view.live_ids[np.sort(chosen)]
