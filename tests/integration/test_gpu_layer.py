"""What both runners of GPUs decide before they run; they run in tests/engine/test_gpu_path.py."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.integration.vllm import gpu_layer
from vtoken.integration.vllm.attention_gpu_choice import GpuFacts
from vtoken.integration.vllm.cache_signals import WORK_BYTES
from vtoken.integration.vllm.device_rows import DeviceSlotRows
from vtoken.integration.vllm.gpu_core import TokenPages
from vtoken.integration.vllm.gpu_layer import GpuTokenLayer
from vtoken.integration.vllm.self_check_steps import StepsCheck
from vtoken.kv_pages import PagedKV
from vtoken.observation import ATTENTION_HISTORY, ATTENTION_SUM, KEY_NORM, SIGNALS
from vtoken.paged_pool import PagedPool
from vtoken.signal_rows import SignalRows

HOPPER, AMPERE = GpuFacts((9, 0), 3, True), GpuFacts((8, 0), 2, True)


class OnMachine(GpuTokenLayer):
    """On a GPU of which only the facts are known."""

    machine = HOPPER

    def facts(self):
        return self.machine


def make_runner(machine=HOPPER, dtype=torch.bfloat16, backend=None, trtllm=None, score_layers=None):
    """Without vLLM's constructor, which wants a device."""
    runner = object.__new__(OnMachine)
    runner.machine, runner.dtype = machine, dtype
    runner.model_config = SimpleNamespace(get_head_size=lambda: 128)
    runner.cache_config = SimpleNamespace(cache_dtype="auto", block_size=16)
    config = VTokenConfig(mode="lazy", score_layers=score_layers)
    runner.vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend, use_trtllm_attention=trtllm),
        additional_config={"vtoken": config.to_dict()},
    )
    return runner


@pytest.mark.parametrize(
    ("machine", "dtype", "name"),
    [
        (HOPPER, torch.bfloat16, "FLASH_ATTN"),
        (HOPPER, torch.float32, "TRITON_ATTN"),
        (AMPERE, torch.float16, "FLASHINFER"),
    ],
)
def test_vllm_is_told_to_take_the_chosen_backend(machine, dtype, name):
    """It would prefer FlashAttention 2 on Ampere, which cannot read pages of one token."""
    runner = make_runner(machine, dtype)
    found, path = runner.live_attention()
    assert found == name
    assert path.startswith("vtoken.integration.vllm.attention_gpu_")
    attention = runner.vllm_config.attention_config
    assert attention.backend is AttentionBackendEnum[name]
    assert attention.use_trtllm_attention is (False if name == "FLASHINFER" else None)


def test_a_backend_that_the_user_named_is_taken_or_refused():
    """Never replaced."""
    asked = AttentionBackendEnum.TRITON_ATTN
    assert make_runner(backend=asked).live_attention()[0] == "TRITON_ATTN"
    with pytest.raises(UnsupportedError, match="FlashAttention 2"):
        make_runner(AMPERE, backend=AttentionBackendEnum.FLASH_ATTN).live_attention()


def test_tensorrt_kernels_that_the_user_asked_for_are_refused():
    """They read larger pages."""
    with pytest.raises(UnsupportedError, match="use_trtllm_attention=true"):
        make_runner(AMPERE, trtllm=True).live_attention()


def make_sized(score_layers=None):
    """Eight requests of up to 100 tokens, 64 tokens a step, 6 layers of 4 heads of 128."""
    runner = make_runner(score_layers=score_layers)
    impl = SimpleNamespace(num_heads=4, head_size=128)
    names = [f"model.layers.{i}.attn" for i in range(6)]
    layers = {name: SimpleNamespace(impl=impl) for name in names}
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    runner.get_kv_cache_spec = lambda: dict.fromkeys(names)
    runner.max_num_tokens, runner.max_num_reqs, runner.max_model_len = 64, 8, 100
    return runner


def with_policies(monkeypatch, *signals):
    """One policy for each set of signals is all that there is."""
    policies = {str(i): SimpleNamespace(signals=frozenset(s)) for i, s in enumerate(signals)}
    monkeypatch.setattr(gpu_layer, "all_policies", lambda: policies)


@pytest.mark.parametrize(("score_layers", "sampled"), [(None, 4), ((0, 5), 2)])
def test_buffers_are_two_tables_and_the_queries_of_sampled_layers(
    monkeypatch, score_layers, sampled
):
    """In bytes, before any of them exists; no more where no policy looks at anything."""
    with_policies(monkeypatch, ())
    tables, query = 2 * 8 * (100 + 32) * 4, 64 * 4 * 128 * 2
    assert make_sized(score_layers).buffer_bytes() == tables + sampled * query


def test_signals_that_any_policy_needs_are_kept_back(monkeypatch):
    """Whatever is served now: a request may name a policy when the cache has taken the rest."""
    sizes = []
    for policies in [{KEY_NORM}], [{ATTENTION_SUM}], [{ATTENTION_SUM}, {ATTENTION_HISTORY}]:
        with_policies(monkeypatch, (), *policies)
        sizes.append(make_sized().buffer_bytes())
    columns = 8 * (100 + 32)
    assert sizes == [sizes[0], sizes[0] + 4 * columns, sizes[0] + 12 * columns]
    with_policies(monkeypatch, ())
    assert sizes[0] - make_sized().buffer_bytes() == WORK_BYTES


def test_what_is_kept_back_holds_the_rows_of_all_signals():
    """With the policies that there are, for slot rows as they are made."""
    runner = make_sized()
    rows = DeviceSlotRows(8, 100, TokenPages(16), torch.device("cpu"))
    signals = SignalRows(SIGNALS, *rows.table.shape)
    made = 2 * rows.table.nbytes + sum(buffer.nbytes for buffer in signals._buffers.values())
    assert runner.buffer_bytes() >= made + 4 * 64 * 4 * 128 * 2 + WORK_BYTES


def test_sampled_layers_must_exist():
    """Named with the number of layers."""
    with pytest.raises(ConfigError, match="0 … 5"):
        make_sized((6,)).buffer_bytes()


def make_steps(num_slots=512, **limits):
    """The check of whole steps over a pool of one layer."""
    pool = PagedPool([PagedKV.from_cache(torch.zeros(num_slots, 1, 1, 8))])
    defaults = {"max_num_reqs": 8, "max_num_tokens": 512, "max_model_len": 512}
    cache = SimpleNamespace(block_size=16)
    return StepsCheck(SimpleNamespace(cache_config=cache, **defaults | limits), pool)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_slots": 160}, "a KV cache of 160 tokens is too small"),
        ({"max_model_len": 40}, "max_model_len=40"),
        ({"max_num_tokens": 32}, "max_num_batched_tokens=32"),
    ],
)
def test_an_engine_that_is_too_small_to_be_checked_is_refused(sizes, reason):
    """Rather than served unchecked."""
    make_steps()
    with pytest.raises(UnsupportedError, match=reason):
        make_steps(**sizes)
