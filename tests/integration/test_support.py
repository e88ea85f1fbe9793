"""What is refused at start, each with its reason; and what is not."""

from types import SimpleNamespace

import pytest

from vtoken.errors import ConfigError, UnsupportedError
from vtoken.integration.vllm import support
from vtoken.integration.vllm.support import check_supported

PARALLEL = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "use_ubatching": False,
    "enable_fault_tolerance": False,
}
MODEL = {
    "runner_type": "generate",
    "use_mla": False,
    "is_hybrid": False,
    "is_encoder_decoder": False,
    "is_multimodal_model": False,
    "is_moe": False,
    "enable_sleep_mode": False,
}


def make_config(model=(), parallel=(), **others):
    """As much of vLLM's configuration as is looked at."""
    defaults = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "use_v2_model_runner": False,
        "attention_config": SimpleNamespace(backend_per_kind={}),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True),
        "additional_config": {"vtoken": {}},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**MODEL | dict(model)),
        parallel_config=SimpleNamespace(**PARALLEL | dict(parallel)),
        **defaults | others,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel": {"tensor_parallel_size": 4}},
        {"parallel": {"data_parallel_size": 2}},
        {"parallel": {"data_parallel_size": 2, "tensor_parallel_size": 2}},
        {"model": {"is_moe": True}, "parallel": {"tensor_parallel_size": 2}},
        {"use_v2_model_runner": True},
        {"cache_config": SimpleNamespace(cache_dtype="bfloat16")},
    ],
)
def test_supported_configurations_pass(options):
    """Ranks that share the heads, engines that share nothing, either runner."""
    check_supported(make_config(**options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2.* last one"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_.*=2.* different tokens"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_.*=2.* different tokens"),
        (
            {"model": {"is_moe": True}, "parallel": {"data_parallel_size": 2}},
            "data_parallel_size=2 with experts",
        ),
        ({"parallel": {"use_ubatching": True}}, "dual batch overlap"),
        ({"parallel": {"enable_fault_tolerance": True}}, "fault tolerance .* report of copies"),
        ({"model": {"runner_type": "pooling"}}, "runner 'pooling'"),
        ({"model": {"use_mla": True}}, "MLA"),
        ({"model": {"is_hybrid": True}}, "state-space"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"is_multimodal_model": True}}, "multimodal"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "kv_cache_dtype='fp8'"),
    ],
)
def test_everything_else_is_refused_with_its_reason(options, reason):
    """And with the way out."""
    with pytest.raises(UnsupportedError, match=rf"{reason}.*Use --vtoken-mode off"):
        check_supported(make_config(**options))


def test_all_reasons_are_listed_at_once():
    """Not one per attempt."""
    config = make_config(parallel={"pipeline_parallel_size": 2}, speculative_config=object())
    with pytest.raises(UnsupportedError, match=r"speculative.*; pipeline"):
        check_supported(config)


@pytest.mark.parametrize("mode", ["naive", "lazy"])
def test_chunks_of_prompts_need_chunked_prefill(mode):
    """Else a prompt longer than a step's share of the free blocks would never be scheduled."""
    uncut = SimpleNamespace(enable_chunked_prefill=False)
    check_supported(make_config(scheduler_config=uncut))
    ours = {"vtoken": {"mode": mode, "evict_during_prefill": True}}
    check_supported(make_config(additional_config=ours))
    with pytest.raises(ConfigError, match=r"evict_during_prefill=True .*chunked prefill is off"):
        check_supported(make_config(additional_config=ours, scheduler_config=uncut))


def on(monkeypatch, kind):
    """Pretend that vLLM found a platform: ``cuda``, ``rocm`` or ``cpu``."""
    platform = SimpleNamespace(
        device_name=kind, is_cpu=lambda: kind == "cpu", is_cuda=lambda: kind == "cuda"
    )
    monkeypatch.setattr(support, "current_platform", platform)


@pytest.mark.parametrize("is_v2", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"])
def test_cuda_is_served_by_both_runners(monkeypatch, dtype, is_v2):
    """With the caches that its kernels were proven with; whether this GPU has them is the
    worker's question."""
    on(monkeypatch, "cuda")
    cache = SimpleNamespace(cache_dtype=dtype)
    check_supported(make_config(use_v2_model_runner=is_v2, cache_config=cache))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_e5m2")}, "kv_cache_dtype='fp8_e5m2'"),
        ({"model": {"enable_sleep_mode": True}}, "sleep mode"),
        (
            {"attention_config": SimpleNamespace(backend_per_kind={"full_attention": 1})},
            "backend_per_kind",
        ),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
    ],
)
def test_the_rest_is_refused_on_cuda(monkeypatch, options, reason):
    """What was never proven, and what is refused everywhere."""
    on(monkeypatch, "cuda")
    with pytest.raises(UnsupportedError, match=rf"{reason}.*Use --vtoken-mode off"):
        check_supported(make_config(**{"use_v2_model_runner": True} | options))


def test_other_accelerators_are_refused(monkeypatch):
    """By their name."""
    on(monkeypatch, "rocm")
    with pytest.raises(UnsupportedError, match="platform rocm: only CPUs and CUDA"):
        check_supported(make_config(use_v2_model_runner=True))
