"""The hooks over Model Runner V1, on a stand-in for vLLM's runner; the real one runs in all engine
tests on CPUs, and on a faked GPU in tests/engine/test_gpu_path.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.integration.hook_notes import EACH_STEP, HookNotes
from vtoken.integration.vllm.compat.runner_hooks import model_output
from vtoken.integration.vllm.compat.runner_v1 import RunnerV1Hooks


class Stock:
    """vLLM's runner: writes down what it is asked for."""

    def __init__(self):
        self.calls = []
        slots = SimpleNamespace(gpu=torch.tensor([7, 8, 9, -1]), np=np.zeros(4))
        self.input_batch = SimpleNamespace(
            req_ids=["b", "a", None], num_reqs=2, block_table=[SimpleNamespace(slot_mapping=slots)]
        )

    def _update_states(self, scheduler_output):
        self.calls.append("zero, copy blocks, update, sort")
        return "corrections"

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        self.calls.append("prepare")
        return "indices"


class Hooked(HookNotes, RunnerV1Hooks, Stock):
    """The hooks over the stand-in."""


@EACH_STEP
def test_copies_are_joined_before_blocks_are_rewritten(zero, copies, touches):
    """The step begins for us before vLLM looks at it, and its answer is handed on."""
    runner = Hooked()
    step = SimpleNamespace(new_block_ids_to_zero=zero, kv_cache_block_copies=copies)
    assert runner._update_states(step) == "corrections"
    assert runner.calls == [f"begins {touches}", "zero, copy blocks, update, sort", "updated"]


def test_write_slots_are_the_devices_without_padding():
    """A kernel computes them; the host's half of the buffer stays empty on a GPU."""
    runner = Hooked()
    step = SimpleNamespace(total_num_scheduled_tokens=3)
    assert runner._prepare_inputs(step, [1, 2]) == "indices"
    assert runner.calls == ["prepare", (["b", "a"], [1, 2], [7, 8, 9])]


def test_states_of_the_last_forward_come_with_the_batch():
    """In the order of the batch, which V1 keeps beside the state."""
    runner = Hooked()
    runner.execute_model_state = SimpleNamespace(hidden_states="states")
    assert runner.last_forward() == ("states", ["b", "a", None])


@pytest.mark.parametrize("name", ["model_runner_output", "_model_runner_output"])
def test_the_output_inside_a_wrapper_is_found(name):
    """V2's and V1's, whose tensors may still be on their way; a bare output is itself."""
    assert model_output(SimpleNamespace(**{name: "inner"})) == "inner"
    assert model_output("bare") == "bare"
