"""When the core comes to be and when it is called, on a stand-in for vLLM's runner of any kind."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.integration.vllm import runner_base
from vtoken.integration.vllm.runner_base import TokenLayerRunner


class Stock:
    """vLLM's runner: writes down what it is asked for."""

    def __init__(self, output=None):
        self.calls, self.output, self.device = [], output, torch.device("cpu")

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False, **kwargs):
        self.calls.append(("cache", kv_cache_config, is_profiling, kwargs))

    def execute_model(self, scheduler_output, *args, **kwargs):
        self.calls.append("forward")
        return self.output

    def sample_tokens(self, grammar_output):
        self.calls.append("sample")
        return "tokens"

    def shutdown(self):
        self.calls.append("shutdown")


class Runner(TokenLayerRunner, Stock):
    def build_core(self, kv_cache_config):
        self.calls.append("core")
        rows = SimpleNamespace(table="table")
        return SimpleNamespace(
            rows=rows,
            after_forward=lambda: self.calls.append("copies"),
            close=lambda: self.calls.append("close"),
            append=lambda req_ids, num_new, slots: (np.array([3, 1]), np.array([7, 8])),
        )

    def with_report(self, output):
        return f"{output} with report"


@pytest.fixture(autouse=True)
def any_groups(monkeypatch):
    """Caches of the tests have none."""
    monkeypatch.setattr(runner_base, "check_groups", lambda config: None)


def make_runner(output=None):
    """With a core."""
    runner = Runner(output)
    runner.initialize_kv_cache("cache")
    runner.calls.clear()
    return runner


def test_the_core_is_built_over_the_cache_that_stays():
    """Not over the one in which vLLM measures graphs; what else vLLM passes is passed on."""
    runner = Runner()
    runner.initialize_kv_cache("small", is_profiling=True)
    assert runner.calls == [("cache", "small", True, {})]
    with pytest.raises(AssertionError, match="not initialised"):
        _ = runner.core
    runner.initialize_kv_cache("cache", kv_cache_allocation_context="pool")
    context = {"kv_cache_allocation_context": "pool"}
    assert runner.calls[1:] == [("cache", "cache", False, context), "core"]


@pytest.mark.parametrize(("output", "expected"), [(None, None), ("empty", "empty with report")])
def test_copies_start_after_the_forward(output, expected):
    """Where sampling follows it reports, otherwise the step's own output does."""
    runner = make_runner(output)
    assert runner.execute_model("step") == expected
    assert runner.calls == ["forward", "copies"]
    assert runner.sample_tokens(None) == "tokens with report"


def test_dummy_runs_start_no_copies():
    """They belong to no step."""
    runner = make_runner("dummy")
    assert runner.execute_model("step", dummy_run=True) == "dummy"
    assert runner.calls == ["forward"]


def test_rows_of_the_batch_are_on_the_device_and_their_lengths_on_the_host():
    """In the batch's order."""
    live, lens = make_runner().append_rows(["a", "b"], np.array([1, 1]), torch.tensor([5, 6]))
    assert (live.table, live.rows.tolist(), live.lens.tolist()) == ("table", [3, 1], [7, 8])
    assert lens.tolist() == [7, 8]


def test_copies_are_finished_before_the_cache_goes():
    """And the core with it; a runner that never had one shuts down as well."""
    runner = make_runner()
    runner.shutdown()
    runner.shutdown()
    assert runner.calls == ["close", "shutdown", "shutdown"]
