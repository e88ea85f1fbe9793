"""Which document a request follows: generations, and what is kept for how long."""

from __future__ import annotations

import random

import pytest

from vtoken.config import LIVE_FIELDS, VTokenConfig
from vtoken.documents import POOL_FIELDS, Documents
from vtoken.errors import ConfigError

PER_REQUEST = {
    "policy",
    "policy_args",
    "keep_ratio",
    "budget_tokens",
    "sink_tokens",
    "recent_tokens",
    "evict_interval_tokens",
    "evict_during_prefill",
    "evict_free_ratio",
    "max_blocks_per_request",
    "score_interval_steps",
    "score_window_tokens",
}


def change(documents: Documents, budget: int, *, for_new_only: bool = False) -> None:
    config = VTokenConfig(budget_tokens=budget)
    documents.install(documents.make(config), for_new_only=for_new_only)


def test_every_live_field_is_the_pools_or_a_requests() -> None:
    """A new one is put into one of the two sets, and read accordingly."""
    assert POOL_FIELDS | PER_REQUEST == LIVE_FIELDS
    assert not POOL_FIELDS & PER_REQUEST


def test_versions_grow_by_one() -> None:
    """Whom a change is for makes no difference."""
    documents = Documents(VTokenConfig())
    change(documents, 100)
    change(documents, 101, for_new_only=True)
    assert documents.current.version == 3


def test_making_changes_nothing() -> None:
    """A document that cannot be made, or is not installed, is never in force."""
    documents = Documents(VTokenConfig())
    documents.make(VTokenConfig(budget_tokens=77))
    with pytest.raises(ConfigError, match="policy"):
        documents.make(VTokenConfig(policy="no such"))
    assert documents.current.config == VTokenConfig()
    assert documents.current.version == 1


@pytest.mark.parametrize("seed", range(20))
def test_documents_follow_the_rule_told_naively(seed: int) -> None:
    """Each request remembers its own document; a change for all changes every memory."""
    rng = random.Random(seed)
    documents = Documents(VTokenConfig(budget_tokens=50))
    alive: dict[int, tuple[int, int]] = {}  # request -> generation, budget it must have
    for step in range(300):
        what = rng.choice(("arrive", "arrive", "end", "all", "new"))
        budget = documents.current.config.budget_tokens
        if what == "arrive":
            assert budget is not None
            alive[step] = (documents.generation, budget)
        elif what == "end" and alive:
            del alive[rng.choice(list(alive))]
        elif what in ("all", "new"):
            change(documents, 100 + step, for_new_only=what == "new")
            if what == "all":
                alive = {r: (generation, 100 + step) for r, (generation, _) in alive.items()}
            documents.release({generation for generation, _ in alive.values()})
            assert len(documents.in_use()) <= len({b for _, b in alive.values()}) + 1
        for generation, expected in alive.values():
            assert documents.of(generation).config.budget_tokens == expected
