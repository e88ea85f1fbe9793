"""Requests with options of their own on the real engine, through ``extra_args``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import RunArm
from tests.engine.workloads import EVICTING, make_workload, on_tiny_model

pytestmark = pytest.mark.engine

MAX_TOKENS = 50
INTERVAL, SINKS, RECENT = 16, 4, 16
SERVICE = {"policy": "streaming_llm", "budget_tokens": 160}
LONG = 300

OPTIONS: dict[str, dict[str, Any] | None] = {
    "no key, logprobs": {"vtoken_bugdet": 100},  # of the prompt, which the first step computes
    "service": {"vtoken_receipt": "service"},
    "h2o": {"vtoken_policy": "h2o", "vtoken_budget_tokens": 96, "vtoken_receipt": "h2o"},
    "random": {"vtoken_policy": "random", "vtoken_keep_ratio": 0.5, "vtoken_receipt": "random"},
    "snapkv": {"vtoken_policy": "snapkv", "vtoken_budget_tokens": 120, "vtoken_receipt": "snapkv"},
    "protect": {
        "vtoken_policy": "streaming_llm",
        "vtoken_budget_tokens": 64,
        "vtoken_protect": "100:130,200:201",
        "vtoken_receipt": "protect",
    },
    "out": {"vtoken_evict": 0, "vtoken_receipt": "out"},
    "no policy": {"vtoken_policy": "no_such"},
    "no ratio": {"vtoken_keep_ratio": 7, "vtoken_receipt": "bad"},
    "no key": {"vtoken_bugdet": 100},
    "foreign": {"theirs": [1, "x"], "vtoken_receipt": "foreign"},
}
EVICTS = ("service", "h2o", "random", "snapkv", "protect", "foreign")
REFUSED = ("no policy", "no ratio", "no key", "no key, logprobs")

NUM_CORRUPTED_TOKENS = 96


def make_corrupted(level: str) -> dict[str, Any]:
    """For another test: a relocation in every second step or so, with wrong bytes from then on."""
    patch = {"policy": "random", "mode": "lazy", "evict_interval_tokens": 2, "verify": level}
    return make_workload("random", NUM_CORRUPTED_TOKENS, name=level, patch=patch)


def make_spec() -> dict[str, Any]:
    """All at once, then one alone: opted out, under policy none, and with both settings. At last
    the engine is broken."""
    alone = {"prompts": [[11, LONG]], "max_tokens": MAX_TOKENS, "logprobs": 5}
    return {
        **on_tiny_model(dtype="bfloat16"),
        "vtoken": {**EVICTING, **SERVICE, "mode": "lazy", "verify": "full"},
        "workloads": [
            {
                "name": "together",
                "prompts": [[i * 31, LONG + i] for i in range(len(OPTIONS))],
                "options": list(OPTIONS.values()),
                "prompt_logprobs": [1 if "logprobs" in name else None for name in OPTIONS],
                "max_tokens": MAX_TOKENS,
            },
            {"name": "out", **alone, "options": [{"vtoken_evict": False}]},
            {"name": "own none", **alone, "options": [{"vtoken_policy": "none"}]},
            {"name": "none", **alone, "patch": {"policy": "none"}},
            {"name": "own", **alone, "options": [{"vtoken_policy": "h2o"}]},
            {"name": "patched", **alone, "patch": {"policy": "h2o"}},
            {**make_corrupted("sampled"), "fault": ["corrupt_copy", [0]]},
            {**make_corrupted("full"), "may_stop": True},
        ],
    }


@pytest.fixture
def together(run_arm: RunArm) -> dict[str, Any]:
    return run_arm(make_spec())["together"]


def evictions_of(result: dict[str, Any], name: str) -> Iterator[tuple[int, list[int]]]:
    """``(logical length, victims)`` of one request, in order."""
    req_id = result["ids"][list(OPTIONS).index(name)]
    return ((n, ids) for i, n, ids in result["evictions"] if i == req_id)


def target(name: str, num_tokens: int) -> int:
    """What the request may keep."""
    options = OPTIONS[name] or {}
    if ratio := options.get("vtoken_keep_ratio"):
        return -int(-num_tokens * ratio // 1)
    budget = options.get("vtoken_budget_tokens", SERVICE["budget_tokens"])
    assert isinstance(budget, int)
    return budget


@pytest.mark.parametrize("name", EVICTS)
def test_each_request_is_brought_to_its_own_budget(together: dict[str, Any], name: str) -> None:
    """At every eviction exactly the budget is left: at the end of prefill and each interval."""
    length = LONG + list(OPTIONS).index(name)
    evicted, lengths = set[int](), []
    for num_tokens, victims in evictions_of(together, name):
        assert not evicted & set(victims)
        evicted |= set(victims)
        lengths.append(num_tokens)
        assert num_tokens - len(evicted) == target(name, num_tokens)
    assert lengths == list(range(length, length + MAX_TOKENS - 1, INTERVAL))
    assert not evicted & set(range(SINKS))


def test_policies_are_the_requests_own(together: dict[str, Any]) -> None:
    """By their victims: the streaming ones form a prefix, the others do not; all are counted."""
    for name, streaming in {"service": True, "h2o": False, "random": False}.items():
        _, victims = next(evictions_of(together, name))
        assert (victims == list(range(SINKS, SINKS + len(victims)))) == streaming, name
    for policy in ("h2o", "random", "snapkv"):
        num_evicted = sum(len(ids) for _, ids in evictions_of(together, policy))
        assert together["counters"][f"evicted_tokens_total/{policy}"] == num_evicted > 0
        assert together["counters"].get(f"evictions_postponed_total/{policy}", 0) == 0


def test_protected_span_survives(together: dict[str, Any]) -> None:
    """To the end, although everything around it went."""
    gone = {i for _, ids in evictions_of(together, "protect") for i in ids}
    kept = set(range(LONG)) - gone
    assert kept >= {*range(SINKS), *range(100, 130), 200}
    assert gone >= {*range(SINKS, 100), *range(130, 200), *range(201, 250)}


def test_opted_out_request_loses_nothing(together: dict[str, Any]) -> None:
    """Not one token, beside requests that do."""
    assert not list(evictions_of(together, "out"))
    assert together["receipts"][list(OPTIONS).index("out")]["freed_blocks"] == 0


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in REFUSED])
def test_receipts_equal_the_log(together: dict[str, Any], name: str) -> None:
    """Tokens as in the eviction log; policy, version and length besides."""
    receipt = together["receipts"][list(OPTIONS).index(name)]
    evicted = sum(len(ids) for _, ids in evictions_of(together, name))
    policy = {"h2o": "h2o", "random": "random", "snapkv": "snapkv", "out": "none"}.get(
        name, "streaming_llm"
    )
    assert (receipt["policy"], receipt["policy_version"]) == (policy, 1)
    assert (receipt["num_sequences"], receipt["evicted_tokens"]) == (1, evicted)
    length = LONG + list(OPTIONS).index(name) + MAX_TOKENS - 1
    assert receipt["live_tokens"] == length - evicted


def test_receipts_sum_to_the_counters(together: dict[str, Any]) -> None:
    """Blocks and tokens of all requests; those that were refused lost none."""
    receipts = [r for r in together["receipts"] if r is not None]
    for field, family in (("evicted_tokens", "evicted_tokens_total/"), ("freed_blocks", "freed_")):
        counted = sum(v for n, v in together["counters"].items() if n.startswith(family))
        assert sum(receipt[field] for receipt in receipts) == counted > 0


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_options_fail_their_request_alone(together: dict[str, Any], name: str) -> None:
    """An error for it; the engine goes on, and nothing is left behind."""
    index = list(OPTIONS).index(name)
    reasons = together["finish_reasons"]
    assert reasons[index] == "error"
    assert together["tokens"][index] == []
    assert [r for r in reasons if r != "error"] == ["length"] * (len(OPTIONS) - len(REFUSED))
    assert together["free_blocks"] == together["total_blocks"]


@pytest.mark.parametrize("name", ["out", "own none"])
def test_opting_out_equals_policy_none(run_arm: RunArm, name: str) -> None:
    """Tokens and logprobs, bit for bit."""
    results = run_arm(make_spec())
    assert results[name]["tokens"] == results["none"]["tokens"]
    assert results[name]["logprobs"] == results["none"]["logprobs"]


def test_own_policy_equals_the_services(run_arm: RunArm) -> None:
    """Observed likewise, the same victims, bit for bit the same answer."""
    results = run_arm(make_spec())
    strip = [[(n, ids) for _, n, ids in results[w]["evictions"]] for w in ("own", "patched")]
    assert strip[0] == strip[1] != []
    assert results["own"]["tokens"] == results["patched"]["tokens"] != results["none"]["tokens"]
    assert results["own"]["logprobs"] == results["patched"]["logprobs"]
