"""H2O and Scissorhands keep what their definitions say, on real texts (float64 reference)."""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.conftest import RunArm
from tests.engine.reference import ReferenceEviction, Rules
from vtoken.integration.vllm.observer import default_layers

pytestmark = pytest.mark.engine

RULES = Rules(
    layers=default_layers(30),
    budget=110,
    sinks=4,
    recent=16,
    evict_interval=16,
    score_interval=8,
    window=16,
)
POLICIES = ("h2o", "scissorhands")
NUM_PROMPT_TOKENS = 300
NUM_OUTPUT_TOKENS = 40
MIN_AGREEMENT = 0.98


@pytest.fixture(scope="module")
def prompts(model_path: str) -> list[list[int]]:
    """Legal prose, program code and technical prose, from what is on every machine."""
    texts = [
        (Path(__file__).parents[2] / "LICENSE").read_text()[2000:],
        Path(argparse.__file__).read_text()[60_000:],
        pydoc_data.topics.topics["assignment"],
    ]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [tokenizer(text[:8000])["input_ids"][:NUM_PROMPT_TOKENS] for text in texts]


@pytest.fixture(scope="module")
def reference(model_path: str) -> ReferenceEviction:
    """The reference model."""
    return ReferenceEviction(model_path, RULES)


def make_spec(prompts: list[list[int]]) -> dict[str, Any]:
    """Three texts under both policies in fp32, relocating eagerly."""
    workload = {"prompts": [], "prompt_tokens": prompts, "max_tokens": NUM_OUTPUT_TOKENS}
    return {
        "vtoken": {
            "mode": "lazy",
            "budget_tokens": RULES.budget,
            "sink_tokens": RULES.sinks,
            "recent_tokens": RULES.recent,
            "evict_interval_tokens": RULES.evict_interval,
            "score_interval_steps": RULES.score_interval,
            "score_window_tokens": RULES.window,
            "theta_f": 0.0,
            "low_watermark_ratio": 1.0,
            "record_evictions": True,
        },
        "engine": {"dtype": "float32"},
        "workloads": [{**workload, "name": p, "patch": {"policy": p}} for p in POLICIES],
    }


def retained_by(result: dict[str, Any], index: int) -> dict[int, set[int]]:
    """Live tokens of a request after each of its evictions."""
    retained, dead = {}, set()
    for req_id, num_tokens, ids in result["evictions"]:
        if req_id == result["ids"][index]:
            dead |= set(ids)
            retained[num_tokens] = set(range(num_tokens)) - dead
    return retained


@pytest.mark.parametrize("policy", POLICIES)
def test_engine_retains_what_the_reference_retains(
    run_arm: RunArm, prompts: list[list[int]], reference: ReferenceEviction, policy: str
) -> None:
    """At least 98 % after every eviction, in prefill and decode, of each text."""
    result = run_arm(make_spec(prompts))[policy]
    for i, prompt in enumerate(prompts):
        expected = reference.run(policy, prompt, result["tokens"][i])
        actual = retained_by(result, i)
        assert actual.keys() == expected.keys()
        for length, tokens in expected.items():
            assert len(tokens) == RULES.budget
            agreement = len(tokens & actual[length]) / len(tokens)
            assert agreement >= MIN_AGREEMENT, (policy, i, length, agreement)
    assert result["counters"]["relocations_total/committed"] > 0
