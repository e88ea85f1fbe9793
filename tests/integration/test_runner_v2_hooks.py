"""The hooks over Model Runner V2, on a stand-in for vLLM's runner; the real one runs in
tests/engine/test_runner_v2.py."""

from types import SimpleNamespace

import pytest
import torch

from tests.integration.hook_notes import EACH_STEP, HookNotes
from vtoken.integration.vllm import scheduler
from vtoken.integration.vllm.compat.runner_v2 import RunnerV2Hooks


class Stock:
    """vLLM's runner: writes down what it is asked for."""

    def __init__(self):
        self.calls = []
        builders = [SimpleNamespace(metadata_builders=["a", "b"])]
        self.attn_groups = [builders, [SimpleNamespace(metadata_builders=["c"])]]

    def finish_requests(self, scheduler_output):
        self.calls.append("finish")

    def update_requests(self, scheduler_output):
        self.calls.append("update, zero, copy blocks")

    def prepare_attn(self, input_batch):
        self.calls.append("prepare")
        return ("tables",), torch.tensor([[7, 8, 9, -1, -1]])


class Hooked(HookNotes, RunnerV2Hooks, Stock):
    """The hooks over the stand-in."""


@EACH_STEP
def test_copies_are_joined_before_blocks_are_rewritten(zero, copies, touches):
    """The step begins for us before vLLM looks at it, and is complete after vLLM's last change."""
    runner = Hooked()
    step = SimpleNamespace(new_block_ids_to_zero=zero, kv_cache_block_copies=copies)
    runner.finish_requests(step)
    runner.update_requests(step)
    assert runner.calls == [f"begins {touches}", "finish", "update, zero, copy blocks", "updated"]


def test_write_slots_are_those_of_the_tokens_without_padding():
    """And vLLM gets its own answer back."""
    runner = Hooked()
    batch = SimpleNamespace(req_ids=["x"], num_scheduled_tokens=[3], num_tokens=3)
    tables, slots = runner.prepare_attn(batch)
    assert runner.calls == ["prepare", (["x"], [3], [7, 8, 9])]
    assert tables == ("tables",)
    assert slots.shape == (1, 5)


def test_builders_of_all_groups_are_found():
    """One of them that is not ours must not be overlooked."""
    assert Hooked().metadata_builders() == ["a", "b", "c"]


def test_caches_come_in_the_order_of_the_model():
    """Layer 10 comes after layer 2, whatever order vLLM names them in."""
    runner = Hooked()
    names = [f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0)]
    context = {name: SimpleNamespace(kv_cache=f"cache of {name}") for name in names}
    runner.compilation_config = SimpleNamespace(static_forward_context=context)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names)])
    found = runner.layer_caches(config)
    assert list(found) == names[::-1]
    assert found[names[0]] == f"cache of {names[0]}"


@pytest.mark.parametrize(
    ("is_async", "name"), [(True, "VTokenAsyncScheduler"), (False, "VTokenScheduler")]
)
def test_scheduler_follows_vllms_decision(monkeypatch, is_async, name):
    """It is made after the engine arguments were given."""
    for each in ("VTokenAsyncScheduler", "VTokenScheduler"):
        monkeypatch.setattr(scheduler, each, lambda *args, each=each, **kwargs: (each, kwargs))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    made = scheduler.scheduler_for(vllm_config=config, log_stats=False)
    assert made == (name, {"log_stats": False})
