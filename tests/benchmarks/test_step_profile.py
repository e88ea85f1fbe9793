"""What the step's profile makes of stacks as py-spy writes them."""

import pytest

from benchmarks.step_profile import ATTENTION, KV_UPDATE, PARTS, REST, SCHEDULER, WORKER, shares

STEP = "_serve (benchmarks/step_time.py:150);LLMEngine.step (vllm/v1/engine/llm_engine.py:300)"
WORK = f"{STEP};Runner.execute_model (vtoken/integration/vllm/model_runner.py:70)"
STACKS = [
    f"{WORK};Live.forward (vtoken/integration/vllm/attention_cpu.py:9);op (torch/_ops.py:1) 40",
    f"{WORK};CPUAttentionBackendImpl.forward (vllm/v1/attention/backends/cpu_attn.py:3) 10",
    f"{WORK};LiveCPUAttention.do_kv_cache_update (vtoken/integration/vllm/attention_cpu.py:5) 5",
    f"{WORK};forward (vllm/model_executor/models/llama.py:5);linear (torch/nn/functional.py:8) 30",
    f"{WORK};SlotRows.append (vtoken/integration/vllm/slot_rows.py:7);take (numpy/core.py:2) 5",
    f"{STEP};schedule (vtoken/integration/vllm/scheduler.py:8);schedule (vllm/v1/scheduler.py:9) 4",
    f"{STEP};schedule (vtoken/integration/vllm/scheduler.py:8) 6",
    "_bootstrap (threading.py:1);copy (vtoken/kv_pool.py:9) 900",
]


def test_each_sample_belongs_to_one_part():
    """By what it runs inside of, then by whose code is innermost; other threads do not count."""
    found = shares(STACKS)
    assert found["samples"] == 100
    assert found["parts"] == {
        ATTENTION: 0.5,
        KV_UPDATE: 0.05,
        SCHEDULER: 0.06,
        WORKER: 0.05,
        REST: 0.34,
    }
    assert set(found["parts"]) == set(PARTS)


def test_functions_are_ours_with_all_that_they_call():
    """Adapters include vLLM's work beneath them; a line number does not split a function."""
    functions = shares([*STACKS, STACKS[6].replace(":8) 6", ":11) 10")])["functions"]
    name = "schedule (vtoken/integration/vllm/scheduler.py)"
    assert functions[name] == pytest.approx(20 / 110, abs=1e-4)
    assert not any("vllm/v1" in function for function in functions)


def test_profile_of_something_else_is_an_error():
    """No step in any stack: the wrong process, or no sample."""
    with pytest.raises(ValueError, match="no sample has a frame"):
        shares(STACKS[-1:])
