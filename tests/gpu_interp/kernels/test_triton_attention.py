"""vLLM's Triton attention, driven by our metadata, reads live tokens and nothing else."""

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from vtoken.integration.vllm.attention_gpu_triton import LiveTritonBackend, LiveTritonImpl

_spec = importlib.util.spec_from_file_location(
    "attention_case", Path(__file__).parents[1] / "attention_case.py"
)
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

# numpy warns of the 0 / 0 in rows that pad a tile; the kernel masks them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LAYOUTS = [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC]
STEPS = {
    "decode": ([1, 37, 130], [1, 1, 1]),
    "mixed": ([77, 40, 16, 20], [1, 17, 1, 20]),
    "prefill": ([30, 7], [30, 7]),
}
SHAPES = {"MHA": (4, 4, 64), "GQA": (8, 2, 64), "7 queries per key": (14, 2, 128), "96": (6, 2, 96)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """vLLM's cache write picks its tile by the GPU's generation."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def make_impl(heads, kv_heads, dim, **kwargs):
    """One layer's attention, built as vLLM builds it: on the CPU, where none is a GPU."""
    return LiveTritonImpl(heads, dim, dim**-0.5, kv_heads, None, None, "auto", **kwargs)


def run(step, shape, mode=CUDAGraphMode.NONE, dtype=torch.bfloat16, **kwargs):
    """Attention of one step through vLLM's group and our builder."""
    group, _ = case.make_group(LiveTritonBackend, *shape, dtype, mode)
    return step.run(group, make_impl(*shape, **kwargs))


@pytest.mark.parametrize(
    ("batch", "shape"),
    [(batch, shape) for batch in ("decode", "mixed") for shape in SHAPES] + [("prefill", "GQA")],
)
def test_output_is_attention_over_live_tokens(batch, shape):
    """Against float64; dead tokens, freed blocks and stale row ends are NaN."""
    shape = SHAPES[shape]
    step = case.Step(*STEPS[batch], *shape)
    output = run(step, shape)
    assert torch.isfinite(output).all()
    assert (output.double() - step.reference()).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [STEPS["decode"], STEPS["mixed"]], ids=["decode", "mixed"])
def test_where_tokens_lie_does_not_change_a_bit(batch, dtype):
    """Scattered and compacted placements give the same bits: relocation is invisible."""
    shape = (8, 2, 64)
    scattered = run(case.Step(*batch, *shape, dtype=dtype), shape, dtype=dtype)
    compacted = run(case.Step(*batch, *shape, dtype=dtype, scattered=False), shape, dtype=dtype)
    assert torch.equal(scattered, compacted)


def test_head_major_blocks_are_read_as_tokens_too():
    """vLLM's other layout whose blocks split into tokens gives the same bits."""
    shape = (8, 2, 64)
    outputs = [run(case.Step(*STEPS["mixed"], *shape, layout=x), shape) for x in LAYOUTS]
    assert torch.equal(*outputs)


def test_soft_cap_is_kept():
    """Of the stock kernel's options, those that need no positions still work."""
    shape = (8, 2, 64)
    step = case.Step(*STEPS["mixed"], *shape)
    output = run(step, shape, logits_soft_cap=1.5)
    assert (output.double() - step.reference(soft_cap=1.5)).abs().max() < 0.02


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE])
def test_graph_replays_see_the_rows_of_their_step(mode):
    """Metadata built at capture, replayed after the buffers were filled: the right output.

    A replay runs the captured kernels over the captured addresses: the metadata objects of the
    capture with whatever the buffers hold then.
    """
    shape = (8, 2, 64)
    group, tables = case.make_group(LiveTritonBackend, *shape, mode=mode)
    step = case.Step([37, 130, 9, 64], [1, 1, 1, 1], *shape)
    common = step.common()
    captured = group.build_metadata_for_cudagraph_capture(common)
    captured.query_start_loc = common.query_start_loc
    group.metadata_builders[0].set_live_rows(step.live())
    replayed = group.build_metadata(common)
    assert captured.block_table.data_ptr() == replayed.block_table.data_ptr()
    assert captured.seq_lens.data_ptr() == replayed.seq_lens.data_ptr() == tables.lens.data_ptr()
    impl, layer, (key, value) = make_impl(*shape), case.make_layer(), step.new_kv()
    impl.do_kv_cache_update(layer, key, value, step.cache, common.slot_mapping)
    output = torch.zeros_like(step.query)
    impl.forward(layer, step.query, key, value, step.cache, captured, output)
    assert (output.double() - step.reference()).abs().max() < 0.02


def test_padded_requests_of_a_graph_read_nothing():
    """A graph for four requests replays two: the others have no live token."""
    shape = (8, 2, 64)
    group, tables = case.make_group(LiveTritonBackend, *shape)
    full = case.Step([5, 6, 7, 8], [1, 1, 1, 1], *shape)
    group.metadata_builders[0].set_live_rows(full.live())
    group.build_metadata(full.common())
    few = case.Step([3, 9], [1, 1], *shape)
    group.metadata_builders[0].set_live_rows(few.live())
    metadata = group.build_metadata(full.common())
    assert metadata.seq_lens.tolist() == [3, 9, 0, 0]
    assert tables.lens.tolist() == [3, 9, 0, 0, 0, 0]


@pytest.mark.parametrize("batch", [STEPS["decode"], STEPS["mixed"]], ids=["decode", "mixed"])
@pytest.mark.parametrize("scale", [0.5])
def test_fp8_caches_are_read_as_the_numbers_they_stand_for(batch, scale, monkeypatch):
    """Per tensor, e4m3, as vLLM stores them: in bytes, divided by the layer's scale."""
    monkeypatch.setattr(current_platform, "has_device_capability", lambda *args, **kwargs: True)
    shape = (8, 2, 64)
    step = case.Step(*batch, *shape)
    step.kv = (step.kv / scale).to(torch.float8_e4m3fn).to(torch.bfloat16) * scale
    cache = torch.full(step.cache.shape, 0x7F, dtype=torch.uint8)  # NaN in e4m3
    old = torch.ones(len(step.slots), dtype=torch.bool)
    old[step.new] = False
    stored = (step.kv / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[step.slots[old], :, 0] = stored[old]
    step.cache = cache
    layer = case.make_layer()
    layer._k_scale = layer._v_scale = torch.full((1,), scale)
    group, _ = case.make_group(LiveTritonBackend, *shape, torch.uint8)
    heads, kv_heads, dim = shape
    output = step.run(
        group, LiveTritonImpl(heads, dim, dim**-0.5, kv_heads, None, None, "fp8"), layer
    )
    assert torch.equal(cache[step.slots, :, 0], stored)
    assert (output.double() - step.reference()).abs().max() < 0.02
