"""The runners of GPUs are thin: what they rely on in vLLM's, generation by generation.

They run in tests/engine/test_gpu_path.py, on a device that is faked.
"""

import dataclasses
import inspect

import pytest
from vllm.config.attention import AttentionConfig
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.worker import gpu_input_batch, gpu_model_runner
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.gpu import model_runner

from vtoken.integration.vllm.gpu_runner import VTokenGPUModelRunner
from vtoken.integration.vllm.gpu_runner_v1 import VTokenGPUModelRunnerV1

V1, V2 = gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner
OURS = {V1: VTokenGPUModelRunnerV1, V2: VTokenGPUModelRunner}
OVERRIDDEN = {
    V1: {
        "__init__": ["vllm_config", "device"],
        "load_model": ["load_dummy_weights", "model"],
        "initialize_kv_cache": ["kv_cache_config", "is_profiling", "kv_cache_allocation_context"],
        "execute_model": ["scheduler_output", "intermediate_tensors"],
        "sample_tokens": ["grammar_output"],
        "_update_states": ["scheduler_output"],
        "_prepare_inputs": ["scheduler_output", "num_scheduled_tokens"],
        "shutdown": [],
    },
    V2: {
        "__init__": ["vllm_config", "device"],
        "load_model": ["load_dummy_weights", "args", "model", "kwargs"],
        "initialize_kv_cache": ["kv_cache_config", "is_profiling", "kv_cache_allocation_context"],
        "execute_model": [
            "scheduler_output",
            "intermediate_tensors",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "is_profile",
            "context_len",
            "valid_dummy_state_slots",
            "randomize_inputs",
        ],
        "sample_tokens": ["grammar_output"],
        "finish_requests": ["scheduler_output"],
        "update_requests": ["scheduler_output"],
        "prepare_attn": ["input_batch"],
        "shutdown": [],
    },
}
SHAPES = [(of, name) for of, names in OVERRIDDEN.items() for name in names]


@pytest.mark.parametrize(("of", "name"), SHAPES)
def test_vllms_methods_have_the_shape_that_was_read(of, name):
    """What we override or call: another shape means that its meaning must be read again."""
    found = list(inspect.signature(getattr(of, name)).parameters)[1:]
    assert found == OVERRIDDEN[of][name]


@pytest.mark.parametrize("of", OURS)
def test_every_method_of_vllm_that_we_override_is_listed(of):
    """Nothing is overridden by accident, and nothing goes unread."""
    ours = [cls for cls in OURS[of].__mro__ if cls.__module__.startswith("vtoken.")]
    names = {name for cls in ours for name, of in vars(cls).items() if inspect.isfunction(of)}
    assert {name for name in names if hasattr(of, name)} <= set(OVERRIDDEN[of])


@pytest.mark.parametrize("of", OURS)
def test_a_generation_adds_nothing_but_its_hooks(of):
    """What is decided for GPUs is decided once, before vLLM's runner is asked."""
    first, layer, base, hooks, *_ = OURS[of].__mro__
    assert not [name for name, of in vars(first).items() if inspect.isfunction(of)]
    assert [cls.__name__ for cls in (layer, base)] == ["GpuTokenLayer", "TokenLayerRunner"]
    assert hooks.__module__.startswith("vtoken.integration.vllm.compat.runner_v")


def test_what_is_read_of_vllm_is_there():
    """Fields of its plain data, and buffers of V1's batch."""
    assert {"input_batch", "hidden_states"} <= set(model_runner.ExecuteModelState._fields)
    assert "hidden_states" in gpu_model_runner.ExecuteModelState._fields
    assert {"req_ids", "num_reqs"} <= set(dir(gpu_input_batch.InputBatch))
    assert "self.slot_mapping = self._make_buffer" in inspect.getsource(BlockTable.__init__)
    for of, wanted in {
        AttentionConfig: {"backend", "backend_per_kind", "use_trtllm_attention"},
        NewRequestData: {"prefill_token_ids", "block_ids", "num_computed_tokens"},
        CachedRequestData: {"num_computed_tokens", "num_output_tokens", "new_block_ids"},
    }.items():
        assert wanted <= {field.name for field in dataclasses.fields(of)}
