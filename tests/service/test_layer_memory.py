"""What ``size`` says that the token layer keeps is what the worker does, under vLLM's limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from service.layer_memory import Limits, default_limits, layer_bytes
from tests.integration.test_gpu_layer import make_sized

GIB = 1 << 30


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    [(100, 8, 64), (8192, 256, 2048), (131_072, 1024, 8192)],
)
def test_it_is_what_the_worker_keeps_back(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """To the byte; the worker's model has 6 layers of 4 heads of 128."""
    runner = make_sized()
    runner.max_model_len, runner.max_num_reqs = max_model_len, max_num_seqs
    runner.max_num_tokens = max_num_batched_tokens
    limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens)
    assert layer_bytes(limits, 16, 6, 4, 128) == runner.buffer_bytes()


def test_a_model_of_few_layers_has_all_of_them_sampled() -> None:
    """The default is four."""
    limits = Limits(100, 1, 64)
    one, three, four, nine = (layer_bytes(limits, 16, n, 4, 128) for n in (1, 3, 4, 9))
    assert four == nine
    assert three - one == 2 * (four - three) == 2 * 64 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("memory_gib", "gpu"),
    [(22.5, "l4"), (80.0, "a100"), (79.6, "h100"), (140.4, "h200"), (178.0, None), (48.0, None)],
)
def test_limits_are_those_that_vllm_takes_there(
    monkeypatch: pytest.MonkeyPatch, memory_gib: float, gpu: str | None
) -> None:
    """Asked of vLLM itself, on a platform of that name and size."""
    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(memory_gib * GIB),
        get_device_name=lambda: f"NVIDIA {(gpu or 'of another kind').upper()}",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    server = UsageContext.OPENAI_API_SERVER
    assert default_limits(4096, memory_gib, gpu) == Limits(4096, seqs[server], tokens[server])
