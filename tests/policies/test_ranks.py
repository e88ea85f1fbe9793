"""Policies that choose by rank: many requests at once, and answers that break the contract."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core_models import make_layer, make_request
from vtoken.errors import PolicyError
from vtoken.eviction import Due
from vtoken.policies.ranks import RankPolicy, RankQuestion, checked_ranks
from vtoken.policies.registry import POLICIES

BY_RANK = [name for name, policy in POLICIES.items() if issubclass(policy, RankPolicy)]


def make_question(*requests: tuple[int, int], first_seed: int = 0) -> RankQuestion:
    """Requests as (candidates, victims), of lengths and seeds of their own."""
    candidates, victims = np.array(requests, np.int64).reshape(-1, 2).T
    lengths = 2 * candidates + 1
    return RankQuestion(candidates, victims, lengths, np.arange(len(requests)) + first_seed)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Some requests, of which any part must go."""
    candidates = draw(st.lists(st.integers(0, 200), min_size=1, max_size=6))
    return [(n, draw(st.integers(0, n))) for n in candidates]


@pytest.mark.parametrize("name", BY_RANK)
@given(asked=requests(), seed=st.integers(-1, 2**64))
def test_many_requests_get_what_each_gets_alone(
    name: str, asked: list[tuple[int, int]], seed: int
) -> None:
    """Within the contract, whatever the number and the order of the others."""
    policy = POLICIES[name](seed)
    assert isinstance(policy, RankPolicy)
    together = checked_ranks(policy, make_question(*asked))
    alone = [checked_ranks(policy, make_question(one, first_seed=i)) for i, one in enumerate(asked)]
    assert together.tolist() == np.concatenate(alone).tolist()


def test_random_ranks_are_uniform_for_few_and_for_many() -> None:
    """Every rank is drawn about equally often (±6 standard deviations), and pairs are, too."""
    policy = POLICIES["random"](5)
    assert isinstance(policy, RankPolicy)
    for num_candidates, num_victims in ((40, 8), (40, 30)):
        asked = make_question(*[(num_candidates, num_victims)] * 4000)
        ranks = checked_ranks(policy, asked).reshape(4000, num_victims)
        drawn = np.zeros((4000, num_candidates))
        np.put_along_axis(drawn, ranks, 1, axis=1)
        share = num_victims / num_candidates
        deviation = (4000 * share * (1 - share)) ** 0.5
        assert (abs(drawn.sum(0) - 4000 * share) < 6 * deviation).all()
        both = share * (num_victims - 1) / (num_candidates - 1)
        neighbours = (drawn[:, :-1] * drawn[:, 1:]).sum(0)
        assert (abs(neighbours - 4000 * both) < 6 * (4000 * both * (1 - both)) ** 0.5).all()


def test_random_ranks_depend_on_seed_prompt_and_length() -> None:
    """And on nothing else."""
    question = make_question((500, 20))
    asked = [
        (0, question),
        (1, question),
        (0, question._replace(request_seeds=np.array([9]))),
        (0, question._replace(num_tokens=np.array([9]))),
    ]
    draws = {tuple(POLICIES["random"](seed).select_ranks(q).tolist()) for seed, q in asked}  # type: ignore[attr-defined]
    assert len(draws) == 4


class _Scripted(RankPolicy):
    """Answers as it was told to."""

    name = "scripted"
    summary = "For tests."

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def select_ranks(self, asked: RankQuestion) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 1], "expected 3 ranks"),
        ([0.0, 1.0, 0.0], "got float64"),
        ([1, 0, 0], "not distinct and ascending"),
        ([1, 1, 0], "not distinct and ascending"),
        ([0, 5, 0], "rank 5 of 5 candidates"),
        ([0, 1, -1], "rank -1 of 2 candidates"),
    ],
)
def test_answers_that_break_the_contract_are_refused(answer: list[Any], message: str) -> None:
    """Number, type, order and range; ranks of different requests may be equal."""
    question = make_question((5, 2), (2, 1))
    assert checked_ranks(_Scripted([0, 1, 1]), question).tolist() == [0, 1, 1]
    with pytest.raises(PolicyError, match=message):
        checked_ranks(_Scripted(answer), question)


@pytest.mark.parametrize("answer", [RuntimeError("boom"), [61], [0, 1]])
def test_broken_policy_costs_no_request_a_token(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All of its requests keep what they have, are due again, and are counted."""
    layer, pool = make_layer(policy="random", budget_tokens=199, evict_interval_tokens=4)
    requests = [make_request(layer, pool, name, num_tokens=64) for name in "a"]
    layer.control.patch({"budget_tokens": 63})
    layer.evictor.documents.current.__dict__["policy"] = _Scripted(answer)
    layer.evict_due([Due(kv, 64) for kv in requests])
    assert [(kv.num_evicted, kv.next_evict_at) for kv in requests] == [(0, 68)]
    assert layer.stats.counter("policy_errors_total", "scripted") == len(requests)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    layer.verification.check_all()
