"""Live tables keep their addresses; backends answer vLLM so that it splits blocks into tokens.

No kernel runs here: those are under ``tests/gpu_interp``.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup, select_common_block_size

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_gpu import LiveTables, attach_tables
from vtoken.integration.vllm.attention_gpu_choice import GpuFacts, LayerFacts, choose_gpu_backend
from vtoken.integration.vllm.attention_gpu_flash import LiveFlashBackend
from vtoken.integration.vllm.attention_gpu_triton import LiveTritonBackend, LiveTritonImpl
from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.layers import attention_override

_spec = importlib.util.spec_from_file_location(
    "attention_case", Path(__file__).parents[1] / "gpu_interp" / "attention_case.py"
)
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

BACKENDS = [LiveTritonBackend, LiveFlashBackend]
SHAPE = (8, 2, 64)


def make_rows(*lens):
    """Rows 5, 4, … with slots 100·row + column."""
    rows = torch.arange(5, 5 - len(lens), -1)
    table = (100 * torch.arange(6)[:, None] + torch.arange(40)).int()
    return LiveRows(table, rows, torch.tensor(lens))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_splits_blocks_into_tokens(backend):
    """The answer is the int 1: a multiple of one would let vLLM keep its blocks of 16."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert backend.get_supported_kernel_block_sizes(spec) == [1]
    assert select_common_block_size(16, [backend], [spec]) == 1
    assert backend.supports_block_size(16)
    assert backend.get_preferred_block_size(16) == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_is_told_what_rows_cannot_express(backend):
    """vLLM's own validation refuses before any memory is taken."""
    reasons = backend.validate_configuration(
        head_size=64,
        dtype=torch.bfloat16,
        kv_cache_dtype="int8_per_token_head",
        block_size=16,
        use_mla=False,
        has_sink=True,
        use_sparse=False,
        use_mm_prefix=True,
        use_per_head_quant_scales=False,
        device_capability=None if backend is LiveTritonBackend else (9, 0),
        attn_type="encoder",
        has_sliding_window=True,
        use_non_causal=True,
        use_rswa=True,
    )
    for part in ("kv_cache_dtype", "sinks", "multimodal", "encoder", "sliding", "non-causal"):
        assert any(part in reason for reason in reasons), part


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE])
def test_metadata_reads_live_tokens_at_fixed_addresses(backend, mode):
    """Rows, lengths and maxima are the live ones; addresses stay from batch to batch."""
    group, tables = case.make_group(backend, *SHAPE, mode=mode)
    places = set()
    for lens in ([3, 40, 7], [1, 2, 30]):
        step = case.Step(lens, [1, 1, 1], *SHAPE)
        group.metadata_builders[0].set_live_rows(step.live())
        metadata = group.build_metadata(step.common())
        places.add((metadata.block_table.data_ptr(), metadata.seq_lens.data_ptr()))
        assert metadata.seq_lens.tolist() == lens
        assert metadata.max_seq_len == max(lens)
        for row, part in zip(metadata.block_table, step.parts, strict=True):
            assert torch.equal(row[: len(part)].long(), step.slots[part])
        assert torch.equal(metadata.slot_mapping, step.slots[step.new])
    capture = group.build_metadata_for_cudagraph_capture(step.common())
    places.add((capture.block_table.data_ptr(), capture.seq_lens.data_ptr()))
    assert places == {(tables.table.data_ptr(), tables.lens.data_ptr())}
    assert tables.table.data_ptr() == group.kernel_block_table.data_ptr()


def test_vllm_no_longer_writes_positional_blocks_into_the_table():
    """Its mapping would rewrite whole rows."""
    group, tables = case.make_group(LiveTritonBackend, *SHAPE)
    tables.table.fill_(-7)
    group.build_metadata(case.Step([3, 4], [1, 1], *SHAPE).common())
    assert (tables.table == -7).all()


def test_a_dummy_run_does_not_read_an_old_batch():
    """Rows are consumed by one build; afterwards lengths are those that vLLM names."""
    group, tables = case.make_group(LiveTritonBackend, *SHAPE)
    step = case.Step([3, 4], [1, 1], *SHAPE)
    group.metadata_builders[0].set_live_rows(step.live())
    group.build_metadata(step.common())
    dummy = group.build_metadata(step.common())
    assert dummy.seq_lens.tolist() == [33, 34]
    assert dummy.max_seq_len == 34
    assert dummy.seq_lens.data_ptr() == tables.lens.data_ptr()


def test_lengths_on_the_host_are_taken_as_given():
    """What FlashInfer plans with: no copy from the device is made for it."""
    tables = LiveTables(torch.zeros(6, 64, dtype=torch.int32))
    live = make_rows(3, 9)
    tables.fill(live, torch.tensor([3, 9]))
    common = tables.view(case.Step([3, 9], [1, 1], *SHAPE).common())
    assert common.seq_lens_cpu_upper_bound.tolist() == [3, 9]
    assert common.seq_lens_cpu_upper_bound.dtype == torch.int32


def test_rows_are_copied_up_to_the_longest_only():
    """Wide tables of long contexts are not rewritten for short requests."""
    tables = LiveTables(torch.full((6, 64), -1, dtype=torch.int32))
    tables.fill(make_rows(3, 9), torch.tensor([3, 9]))
    assert tables.table[0, :9].tolist() == list(range(500, 509))
    assert tables.table[1, :9].tolist() == list(range(400, 409))
    assert (tables.table[:, 9:] == -1).all()
    assert (tables.table[2:] == -1).all()


@pytest.mark.parametrize(
    ("option", "feature"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 128}, "a sliding window of 128"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "KV sharing with layer.0"),
        ({"sinks": torch.zeros(8)}, "learned attention sinks"),
        ({"chunk_lookback": 2}, "the attention option chunk_lookback=2"),
    ],
)
def test_layers_that_rows_cannot_express_are_refused(option, feature):
    """By the layer itself, with what it asked for."""
    with pytest.raises(UnsupportedError, match=feature):
        LiveTritonImpl(8, 64, 0.125, 2, **option)


def test_options_that_are_off_are_not_refused():
    """vLLM passes them on for models that do not use them."""
    LiveTritonImpl(8, 64, 0.125, 2, use_alibi_sqrt=False, chunk_lookback=-1)


def test_groups_that_cannot_read_live_tokens_are_refused():
    """Stock backends, several groups: before any request is served."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    config = case.make_config(*SHAPE)
    for backend in (TritonAttentionBackend, FlashAttentionBackend):
        stock = AttentionGroup(backend, ["layer.0"], spec, 0)
        stock.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=16)
        with pytest.raises(UnsupportedError, match="MetadataBuilder"):
            attach_tables([stock])
        with pytest.raises(UnsupportedError, match="2 attention groups"):
            attach_tables([stock, stock])
    whole = AttentionGroup(LiveTritonBackend, ["layer.0"], spec, 0)
    whole.create_metadata_builders(config, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="blocks of whole tokens, live tokens need"):
        attach_tables([whole])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_chosen_class_stands_in_while_the_model_is_built(capability):
    """Inside the block vLLM's name means our class, outside it is stock again."""
    version = 3 if capability == (9, 0) else 2
    choice = choose_gpu_backend(GpuFacts(capability, version, False), LayerFacts(64))
    backend = AttentionBackendEnum[choice.name]
    stock = backend.get_class()
    with attention_override(choice.name, choice.class_path):
        assert f"{backend.get_class().__module__}.{backend.get_class().__qualname__}" == (
            choice.class_path
        )
    assert backend.get_class() is stock


def test_sampled_layers_leave_their_queries():
    """After stock attention, with the layer's name; without metadata (profiling) nothing."""
    taken = []

    class Sink:
        def take(self, layer_name, query):
            taken.append((layer_name, query))

    class Stock:
        def __init__(self, *args):
            pass

        def forward(self, layer, query, key, value, cache, metadata, output, scale, block_scale):
            return output

    impl = type("Impl", (LiveTritonImpl.__mro__[1], Stock), {})(8, 64, 0.125, 2)
    query, layer = torch.zeros(3, 8, 64), case.make_layer()
    impl.forward(layer, query, None, None, None, object(), query)
    assert taken == []
    impl.query_sink = Sink()
    impl.forward(layer, query, None, None, None, None, query)
    assert taken == []
    impl.forward(layer, query, None, None, None, object(), query)
    assert taken == [("layer.0", query)]
