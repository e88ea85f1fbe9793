"""The cases of the quality scenario, and what is said about answers to them."""

from __future__ import annotations

import asyncio
import math

import pytest

from loadtest.bench import Bench
from loadtest.cli import run_one
from loadtest.documents import generated_document
from loadtest.fleet import Arm, Engine
from loadtest.scenarios import inputs, quality_parts
from loadtest.scenarios.quality_parts import Told, distances
from loadtest.scenarios.quality_tasks import TASKS, Passage, make_cases
from tests.loadtest import fake_service
from tests.loadtest.fake_fleet import FakeFleet

NUM_CONTEXT = 512


@pytest.fixture(autouse=True)
def _small_inputs(monkeypatch) -> None:
    monkeypatch.setattr(inputs, "_made", {})
    monkeypatch.setattr("loadtest.scenarios.quality.long_text", generated_document)


def cases_of(service, tmp_path, num_context: int = NUM_CONTEXT, num_cases: int = 2) -> list:
    async def make():
        async with FakeFleet(service, tmp_path) as fleet:
            client = await fleet.client(Arm("a", "naive"))
            document = generated_document()
            return await make_cases(client, document, num_cases, num_context, 64)

    return asyncio.run(make())


def text_of(tokens) -> str:
    return bytes(tokens).decode()


def test_cases_are_the_same_in_every_run_and_differ_from_each_other(service, tmp_path):
    """All policies are asked the same."""
    first = cases_of(service, tmp_path)
    assert first == cases_of(service, tmp_path)
    assert first[0] != first[1]


@pytest.mark.parametrize("num_context", [256, NUM_CONTEXT])
def test_what_is_scored_comes_after_the_cut(service, tmp_path, num_context):
    """Behind the first token of the tail, which is predicted by the last one of the context."""
    (case,) = cases_of(service, tmp_path, num_context, 1)
    assert [task for passage in case for task in passage.scored] == list(TASKS)
    for passage in case:
        places = [i for task in passage.scored.values() for i in task]
        assert num_context < min(places)
        assert max(places) < len(passage.prompt) <= 2 * num_context


def test_everything_to_be_recalled_is_in_the_context(service, tmp_path):
    """The list, facts and numbers; only what completes them is scored."""
    (case,) = cases_of(service, tmp_path, num_cases=1)
    passage = case[1]
    prompt = text_of(passage.prompt)
    context, asked = prompt[:NUM_CONTEXT], prompt[NUM_CONTEXT:].split("\n")[1:]
    assert len(set(asked)) == len(asked) > 5
    assert all(line in context for line in asked)
    scored = {
        task: text_of(passage.prompt[i] for i in places) for task, places in passage.scored.items()
    }
    (words,) = (line for line in asked if line.startswith("List: "))
    assert words.endswith(scored["copy"] + ".")
    for task, start in (("needle", "The access code "), ("lookup", "The number ")):
        lines = [line for line in asked if line.startswith(start)]
        assert scored[task] == "".join(line.removesuffix(".").split()[-1] for line in lines)


PROMPT = (1, 2, 3, 4)
CASE = (Passage(PROMPT, {"text": (2, 3)}), Passage(PROMPT, {"copy": (2, 3)}))


def told(third: float, fourth: float, top: str = "3", continued=(1, 2, 3)) -> Told:
    """Log-probabilities of the third and the fourth token; ``top`` is likely at the third."""
    after_second = {"3": third} if top == "3" else {"3": third, top: -0.05}
    distributions = [{"2": -9.0}, after_second, {"4": fourth}]
    return Told([distributions, distributions], list(continued))


def test_distances_are_against_full_attention_in_the_same_case():
    """Loss is per scored token; the first of the tail does not count."""
    found = distances(CASE, told(-1.0, -2.0), told(-0.05, -0.5), 0.5)
    assert found["nll"] == pytest.approx(1.5)
    assert found["copy_nll_above_full"] == pytest.approx(1.5 - 0.275)
    assert found["perplexity"] == pytest.approx(math.exp(1.5))
    assert found["kl_top20"] > 0
    assert found["top1_same"] == 1
    assert found["rouge_l"] == 1


def test_accuracy_counts_tokens_that_are_the_most_likely():
    """Here the third token is not."""
    found = distances(CASE, told(-3.0, -0.1, top="9"), told(-0.05, -0.5), 0.5)
    assert (found["copy_match"], found["top1_same"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("keep_ratio", "continued", "expected"),
    [(0.9, (1, 2, 3), 1.0), (0.95, (1, 2, 4), 0.0), (0.75, (1, 2, 3), None)],
)
def test_exact_match_is_said_where_it_says_something(keep_ratio, continued, expected):
    """At nine tenths kept and more."""
    reference = told(-0.1, -0.1)
    ours = told(-0.1, -0.1, continued=continued)
    found = distances(CASE, ours, reference, keep_ratio)
    assert found.get("exact_match") == expected


def measure(service, tmp_path, **overrides) -> dict:
    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet, 1, "smoke", overrides=overrides)
            return await run_one(bench, "quality", tmp_path)

    return asyncio.run(run())


def test_parts_can_be_left_out(service, tmp_path):
    """No policies of a part, no such part: they may be measured apart from each other."""
    identity = measure(service, tmp_path, policies=[], num_generations=3)
    assert set(identity["arms"]) == {"identity/random"}
    details = identity["details"]["identity/random"]
    assert (details["generations"], details["identical"], details["tokens"]) == (3, 3, 72)
    damage = measure(service, tmp_path, identity_policies=[])
    assert set(damage["arms"]) == {"full@1", "random@0.5"}
    assert set(identity["config"]) == {"model", "identity"}
    assert set(damage["config"]) == {"model", "damage"}


def test_running_text_can_be_asked_for_alone(service, tmp_path):
    """Nothing to recall and no continuation: neither sent nor reported."""
    overrides = {"identity_policies": [], "with_recall": False, "num_continued": 0}
    result = measure(service, tmp_path, **overrides)
    metrics = {"nll", "nll_above_full", "kl_top20", "top1_same", "perplexity"}
    assert all(set(arm) == metrics for arm in result["arms"].values())
    assert len(service.requests) == 3  # the reference, full attention again, one cell
    assert all("prompt_logprobs" in body for body in service.requests)
    assert result["config"]["damage"]["with_recall"] is False


def test_stock_vllm_and_an_fp8_cache_are_asked_the_same(service, tmp_path):
    """On services of their own, without anything of the token layer in the request."""
    overrides = {"identity_policies": [], "policies": [], "with_fp8": True}
    assert "damage" not in measure(service, tmp_path, **overrides)["config"]  # that part is out
    result = measure(service, tmp_path, **{**overrides, "policies": ["random"]})
    assert set(result["arms"]) == {"full@1", "stock@1", "stock, fp8@1", "random@0.5"}
    forced = [body for body in service.requests if "prompt_logprobs" in body]
    assert sum("vllm_xargs" in body for body in forced) == len(forced) * 3 // 5


def test_every_cell_gets_every_case_some_at_a_time(service, tmp_path):
    """Three cases by two; the cut falls into the prefill where the tail is teacher-forced."""
    overrides = {"num_cases": 3, "num_parallel": 2, "identity_policies": []}
    result = measure(service, tmp_path, **overrides)
    assert {len(arm["nll"]["samples"]) for arm in result["arms"].values()} == {3}
    forced = [body for body in service.requests if "prompt_logprobs" in body]
    assert len(forced) == 2 * 3 * 3  # full attention is asked twice
    patches = [patch.get("evict_during_prefill") for patch in service.patches[-4:]]
    assert patches == [True, None, True, None]


def test_a_cut_that_did_not_happen_is_an_error(service, tmp_path, monkeypatch):
    """Equal distributions would look like a policy that does no harm."""
    monkeypatch.setattr(fake_service, "_receipt", lambda *_: {"evicted_tokens": 0})
    with pytest.raises(RuntimeError, match="random evicted nothing"):
        measure(service, tmp_path, identity_policies=[])


def test_engine_computes_a_context_in_one_step():
    """And what follows in the next one, after the cut; other flags stay."""
    size = quality_parts.SIZES["full"]
    assert size.engine().flags["max-num-batched-tokens"] == str(size.num_context)
    smoke = quality_parts.SIZES["smoke"]
    assert smoke.engine() == smoke.base_engine
    assert Engine().flags == {}
