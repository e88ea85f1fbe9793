"""One matrix over all registered policies: the contract of ``select_victims`` and the registry."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core_models import make_config, make_signals
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, PolicyError
from vtoken.policies import base
from vtoken.policies.base import (
    EvictionPolicy,
    LiveView,
    checked_victims,
    protect_partial_pages,
    protected_tokens,
)
from vtoken.policies.registry import POLICIES, catalogue, make_policy

ALL = sorted(POLICIES)
EVICTING = [name for name in ALL if POLICIES[name].evicts]
PAGE_SIZE = 4
POLICY_DIR = Path(base.__file__).parent


def make_view(live: list[int], num_tokens: int = 0, seed: int = 7) -> LiveView:
    """A view of these live ids, with random signals of every name."""
    num_tokens = num_tokens or (max(live) + 1 if live else 0)
    ids = np.array(live, np.int64)
    signals = make_signals(ids, rng=np.random.default_rng(seed)).values
    return LiveView(ids, num_tokens, max(1, num_tokens // 2), seed, signals, PAGE_SIZE)


def fit(name: str, view: LiveView, protected: np.ndarray) -> tuple[np.ndarray, int]:
    """What the policy really gets as protected, and in which steps it may be asked."""
    if not POLICIES[name].whole_pages:
        return protected, 1
    return protect_partial_pages(view, protected), view.page_size


@st.composite
def questions(draw: st.DrawFn) -> tuple[LiveView, int, np.ndarray]:
    """A view, the share of unprotected tokens to evict, and protected tokens."""
    live = sorted(draw(st.sets(st.integers(0, 200), min_size=1, max_size=60)))
    view = make_view(live, max(live) + 1 + draw(st.integers(0, 3)), draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        protected = protected_tokens(view, draw(st.integers(0, 8)), draw(st.integers(1, 40)))
    else:
        protected = np.array(draw(st.lists(st.booleans(), min_size=len(live), max_size=len(live))))
    return view, draw(st.floats(0, 1)), protected


@pytest.mark.parametrize("name", EVICTING)
@given(question=questions(), seed=st.integers(0, 2**32 - 1))
def test_policy_keeps_the_contract(name: str, question: Any, seed: int) -> None:
    """Exactly n distinct, ascending, live, unprotected ids; the view is not written."""
    view, share, protected = question
    protected, step = fit(name, view, protected)
    num_victims = int(share * (~protected).sum()) // step * step
    before = view.live_ids.tolist(), protected.tolist()
    victims = checked_victims(POLICIES[name](seed), view, num_victims, protected)
    assert len(victims) == num_victims
    assert victims.dtype == np.int64
    assert sorted(set(victims.tolist())) == victims.tolist()
    assert not set(victims.tolist()) & set(view.live_ids[protected].tolist())
    assert set(victims.tolist()) <= set(view.live_ids.tolist())
    assert (view.live_ids.tolist(), protected.tolist()) == before


@pytest.mark.parametrize("name", ALL)
@given(question=questions(), seed=st.integers(0, 2**32 - 1))
def test_policy_is_deterministic(name: str, question: Any, seed: int) -> None:
    """The same view and seed give the same ids, in one instance and across two."""
    view, share, protected = question
    protected, step = fit(name, view, protected)
    num_victims = int(share * (~protected).sum()) // step * step
    policy = POLICIES[name](seed)
    answers = [
        p.select_victims(view, num_victims, protected).tolist()
        for p in (policy, policy, POLICIES[name](seed))
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name", EVICTING)
def test_policy_can_be_asked_for_everything_unprotected(name: str) -> None:
    """The largest allowed number leaves exactly the protected tokens."""
    view = make_view(list(range(32)))
    protected, _ = fit(name, view, protected_tokens(view, 4, 8))
    victims = checked_victims(POLICIES[name](), view, 20, protected)
    assert victims.tolist() == list(range(4, 24))


@pytest.mark.parametrize("name", ALL)
def test_policy_refuses_unknown_argument(name: str) -> None:
    """ConfigError names the argument; ``seed`` is not an argument that users may give."""
    for key in ("no_such", "seed", "self"):
        config = make_config(policy=name, policy_args={key: 1})
        with pytest.raises(ConfigError, match=f"policy_args.{key}") as caught:
            make_policy(config)
        assert repr(name) in caught.value.bound


@pytest.mark.parametrize("name", ALL)
def test_policy_says_what_it_is(name: str) -> None:
    """Name, one-line summary and a schema, as the catalogue shows them."""
    cls = POLICIES[name]
    assert cls.name == name
    assert cls.summary.endswith(".")
    assert "\n" not in cls.summary
    row = next(row for row in catalogue() if row["name"] == name)
    assert row == {
        "name": name,
        "summary": cls.summary,
        "paper": cls.paper,
        "args_schema": cls.args_schema,
    }


def test_none_never_evicts() -> None:
    """The policy says so itself and names nobody when asked."""
    assert [name for name in ALL if not POLICIES[name].evicts] == ["none"]
    view = make_view([1, 2, 3])
    assert len(POLICIES["none"]().select_victims(view, 2, np.zeros(3, bool))) == 0


def test_streaming_llm_evicts_the_oldest_unprotected() -> None:
    """Sinks stay, then the oldest go."""
    view = make_view([0, 1, 3, 4, 6, 9])
    victims = POLICIES["streaming_llm"]().select_victims(view, 2, protected_tokens(view, 2, 1))
    assert victims.tolist() == [3, 4]


def test_random_depends_on_seed_request_and_length() -> None:
    """Each of the three changes the draw; together they fix it."""
    view, nobody = make_view(list(range(100))), np.zeros(100, bool)
    draws = {
        tuple(POLICIES["random"](seed).select_victims(v, 50, nobody).tolist())
        for seed, v in [
            (0, view),
            (1, view),
            (0, make_view(list(range(100)), seed=8)),
            (0, make_view(list(range(100)), num_tokens=101)),
        ]
    }
    assert len(draws) == 4


def test_random_is_uniform_among_unprotected() -> None:
    """Every unprotected token dies about equally often (±6 standard deviations)."""
    hits = np.zeros(40)
    protected = protected_tokens(make_view(list(range(40))), 4, 4)
    for seed in range(2000):
        view = make_view(list(range(40)), seed=seed)
        hits[POLICIES["random"]().select_victims(view, 8, protected)] += 1
    assert not hits[protected].any()
    expected, deviation = 2000 * 8 / 32, (2000 * 0.25 * 0.75) ** 0.5
    assert (abs(hits[~protected] - expected) < 6 * deviation).all()


def test_protected_tokens_are_sinks_and_recent() -> None:
    """By logical id and length, not by place in the live list."""
    view = make_view([0, 2, 5, 6, 8], num_tokens=10)
    assert protected_tokens(view, 3, 2).tolist() == [True, True, False, False, True]
    assert protected_tokens(view, 0, 1).tolist() == [False] * 5


class _Scripted(EvictionPolicy):
    """Answers with whatever it was given."""

    name = "scripted"
    summary = "For tests."

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def select_victims(self, view: LiveView, num_victims: int, protected: np.ndarray) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([2], "expected 2 integer ids"),
        ([2, 4, 6], "expected 2 integer ids"),
        ([], "expected 2 integer ids"),
        (None, "expected 2 integer ids"),
        ([[2, 4]], "expected 2 integer ids"),
        ([2.0, 4.0], "expected 2 integer ids"),
        ([True, False], "expected 2 integer ids"),
        ([4, 2], "not distinct and ascending"),
        ([4, 4], "not distinct and ascending"),
        (np.array([4, 2], np.uint64), "not distinct and ascending"),
        (np.array([4, 2], np.uint8), "not distinct and ascending"),
        ([2, 3], "token 3 is not live"),
        ([2, 99], "token 99 is not live"),
        ([-2, 2], "token -2 is not live"),
        ([0, 2], "token 0 is protected"),
        ([4, 8], "token 8 is protected"),
    ],
)
def test_broken_answers_are_refused(answer: Any, problem: str) -> None:
    """PolicyError names the policy and what is wrong with the answer."""
    view = make_view([0, 2, 4, 6, 8])
    with pytest.raises(PolicyError, match=f"'scripted': .*{problem}"):
        checked_victims(_Scripted(answer), view, 2, protected_tokens(view, 1, 1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_any_integer_answer_becomes_ids(dtype: type) -> None:
    """A policy may compute in a smaller integer type."""
    view = make_view([0, 2, 4, 6, 8])
    victims = checked_victims(
        _Scripted(np.array([2, 6], dtype)), view, 2, protected_tokens(view, 1, 1)
    )
    assert (victims.tolist(), victims.dtype) == ([2, 6], np.int64)


def test_registry_suggests_the_nearest_policy() -> None:
    """A typo in the name is answered with the name that was probably meant."""
    with pytest.raises(ConfigError, match="did you mean 'streaming_llm'") as caught:
        make_policy(make_config(policy="streamingllm"))
    assert caught.value.field == "policy"
    assert all(name in caught.value.bound for name in ALL)


def test_registry_hands_the_seed_over() -> None:
    """The seed of the configuration is the policy's."""
    assert make_policy(VTokenConfig(policy="random", seed=5)).seed == 5


@pytest.mark.parametrize(
    "path",
    [p for p in POLICY_DIR.glob("*.py") if p.stem not in ("__init__", "base", "registry")],
    ids=lambda path: path.stem,
)
def test_policy_file_has_less_than_fifty_lines_of_code(path: Path) -> None:
    """A published method fits on a page; docstrings, comments and blank lines are free."""
    source = path.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = [
        line
        for number, line in enumerate(source.splitlines(), 1)
        if number not in docs and line.strip() and not line.strip().startswith("#")
    ]
    assert len(code) < 50
