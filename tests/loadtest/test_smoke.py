"""Every scenario against the real service with a tiny model: three starts for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest import scenarios
from tests.engine.tiny_model import ENVIRONMENT
from tests.loadtest.model import make_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NAMES = [name for name in scenarios.NAMES if name != "bookkeeping"]  # needs no service


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """The JSON of every scenario, made by the command line."""
    folder = tmp_path_factory.mktemp("smoke")
    model = make_model(folder / "model")
    command = [sys.executable, "-m", "loadtest", *NAMES, "--smoke", "--model", str(model)]
    done = subprocess.run(
        [*command, "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_scenario_measures_something_and_nothing_fails(results, name):
    """Arms with samples, and no note of a failed request."""
    result = results[name]
    assert result["size"] == "smoke"
    metrics = [metric for arm in result["arms"].values() for metric in arm.values()]
    assert metrics
    assert all(metric["samples"] and None not in metric["samples"] for metric in metrics)
    assert not [note for note in result["notes"] if "failed" in note]


def test_lazy_holds_fewer_blocks_for_the_same_evictions(results):
    """From receipts, so it does not depend on when anybody looked."""
    naive, lazy = (results["paired"]["arms"][f"synthetic/random/{m}"] for m in ("naive", "lazy"))
    assert lazy["end_evicted_tokens"]["samples"] == naive["end_evicted_tokens"]["samples"]
    assert lazy["end_retained_blocks"]["mean"] < naive["end_retained_blocks"]["mean"]
    assert lazy["end_retained_blocks"]["mean"] >= lazy["end_ideal_blocks"]["mean"]
    assert lazy["relocations"]["mean"] > 0


def test_highest_number_of_clients_is_searched_in_every_arm(results):
    """Two fit."""
    swept = {name: arm for name, arm in results["frontier"]["arms"].items() if "sweep" in name}
    assert set(swept) == {f"{arm}, sweep@1200" for arm in ("native", "random/naive", "random/lazy")}
    assert all(arm["highest_feasible"]["samples"] == [2] for arm in swept.values())


def test_naive_and_lazy_answers_are_identical(results):
    """Tokens and logprobs, to the last bit, though blocks were moved."""
    found = results["quality"]["arms"]["identity/random"]
    for name in ("same_tokens", "same_logprobs", "same_evictions"):
        assert set(found[name]["samples"]) == {1.0}, name
    details = results["quality"]["details"]["identity/random"]
    assert details["freed_blocks_lazy"] > details["freed_blocks_naive"]


def test_eviction_is_seen_in_the_distributions_and_full_attention_is_not(results):
    """The full arm is compared with itself; half of the tokens gone is a difference."""
    arms = results["quality"]["arms"]
    assert arms["full@1"]["kl_top20"]["mean"] == 0
    assert arms["full@1"]["top1_same"]["mean"] == 1
    assert arms["random@0.5"]["kl_top20"]["mean"] > 0.001


def test_shared_prefixes_are_found_in_the_cache(results):
    """The first 64 of 96 prompt tokens, in both modes."""
    for arm in results["prefix"]["arms"].values():
        assert arm["prefix_hit_ratio"]["mean"] == pytest.approx(64 / 96)


def test_stock_vllm_counts_steps_and_no_evictions(results):
    """Mode off has vLLM's own metrics and nothing of ours."""
    stock = results["overhead"]["arms"]["stock@96"]
    assert stock["steps"]["mean"] >= 24
    assert "evicted_tokens" not in stock
    assert results["overhead"]["arms"]["lazy, half kept@96"]["evicted_tokens"]["mean"] > 0
