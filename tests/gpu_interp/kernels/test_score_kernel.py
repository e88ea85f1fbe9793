"""The score kernel agrees with float64 and its torch twin, and reads live tokens only."""

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.integration.peak_memory import PeakMemory
from vtoken.gpu_scores.mass import ObservedQueries, mass_by_index
from vtoken.gpu_scores.triton_kernels import mass_by_kernel
from vtoken.integration.vllm.observer_gpu import column_bytes
from vtoken.kv_pages import PagedKV

_spec = importlib.util.spec_from_file_location(
    "attention_case", Path(__file__).parents[1] / "attention_case.py"
)
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

SHAPES = {"MHA": (4, 4, 64), "GQA": (8, 2, 64), "7 queries per key": (14, 2, 128), "96": (6, 2, 96)}


def observe(step, num_queries):
    """The last ``num_queries`` of every request of a step."""
    ends = torch.tensor(step.num_new).cumsum(0)
    back = torch.arange(num_queries - 1, -1, -1)
    return ObservedQueries(
        places=ends[:, None] - 1 - back,
        table=step.table,
        rows=step.rows,
        lens=torch.tensor(step.lens)[:, None] - back,
        width=max(step.lens),
    )


def written(step):
    """The cache with this step's tokens in it too."""
    step.cache[step.slots[step.new], :, 0] = step.kv[step.new]
    return step.paged()


def reference(step, observed, soft_cap=0.0):
    """Softmax weights in float64, mean over heads."""
    n, q = observed.lens.shape
    mass = torch.zeros(n, q, observed.width, dtype=torch.float64)
    group = step.heads // step.kv.shape[1]
    for i in range(n):
        key = step.kv[step.parts[i]][..., : step.dim].double().repeat_interleave(group, 1)
        for j in range(q):
            seen = int(observed.lens[i, j])
            query = step.query[observed.places[i, j]].double()
            logits = torch.einsum("hd,lhd->hl", query, key[:seen]) * step.dim**-0.5
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            mass[i, j, :seen] = logits.softmax(-1).mean(0)
    return mass


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mass_is_the_softmax_weight_of_each_live_token(shape, soft_cap):
    """Against float64 and the torch twin; the sums are 1, behind the end there is nothing."""
    step = case.Step([1, 64, 150], [1, 1, 1], *shape)
    cache, observed = written(step), observe(step, 1)
    mass = mass_by_kernel(step.query, cache, observed, step.dim**-0.5, soft_cap)
    assert (mass.double() - reference(step, observed, soft_cap)).abs().max() < 1e-6
    twin = mass_by_index(step.query, cache, observed, step.dim**-0.5, soft_cap)
    assert (mass - twin).abs().max() < 1e-6
    assert torch.allclose(mass.sum(-1), torch.ones(3, 1))
    assert (mass[0, 0, 1:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_windows_of_queries_see_one_token_more_each(dtype):
    """The observation window at the end of a prefill, in all dtypes of the cache."""
    step = case.Step([20, 70], [9, 7], dtype=dtype)
    observed = observe(step, 5)
    mass = mass_by_kernel(step.query, written(step), observed, 0.125)
    assert (mass.double() - reference(step, observed)).abs().max() < 1e-6
    assert ((mass > 0).sum(-1) == observed.lens).all()


def test_where_tokens_lie_does_not_change_a_bit():
    """So naive and lazy take the same decisions."""
    steps = [case.Step([5, 90], [1, 1], scattered=scattered) for scattered in (True, False)]
    masses = [mass_by_kernel(s.query, written(s), observe(s, 1), 0.125) for s in steps]
    assert torch.equal(*masses)


@pytest.mark.parametrize("num_queries", [1, 4])
def test_what_a_column_takes_is_what_was_planned(num_queries):
    """Statistics of the tiles and the mass itself, beside the sum of the layers before."""
    step = case.Step([256, 250], [num_queries] * 2, 64, 2)
    cache, observed = written(step), observe(step, num_queries)
    with PeakMemory() as peak:
        mass_by_kernel(step.query, cache, observed, 0.125)
    columns = len(observed.rows) * observed.width
    assert peak.num_bytes + 4 * num_queries * columns <= column_bytes(64).of(num_queries) * columns


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_blocks_of_any_layout_are_read(layout):
    """Also blocks of 16 tokens, as strides say."""
    step = case.Step([40], [1])
    cache = PagedKV.from_cache(_in_blocks(step, layout))
    mass = mass_by_kernel(step.query, cache, observe(step, 1), 0.125)
    assert (mass.double() - reference(step, observe(step, 1))).abs().max() < 1e-6


def _in_blocks(step, layout):
    """The tokens of a step in blocks of 16, heads, tokens and content ordered as in ``layout``."""
    kv_heads, width = step.kv.shape[1:]
    num_blocks = step.cache.shape[0] // 16
    sizes = {1: num_blocks, 2: kv_heads, 3: 16, 4: width}
    order = [axis for axis in layout.stride_order if axis]
    memory = torch.full([sizes[axis] for axis in order], float("nan"), dtype=step.kv.dtype)
    cache = memory.permute([order.index(axis) for axis in (1, 2, 3, 4)])
    slots = step.slots
    cache[slots // 16, :, slots % 16] = step.kv
    return cache


def test_fp8_keys_are_scored_as_the_numbers_they_stand_for():
    """A cache in e4m3: the keys that attention sees are the rounded ones."""
    step = case.Step([33], [1])
    step.kv = step.kv.to(torch.float8_e4m3fn).to(step.kv.dtype)
    cache = torch.zeros(step.cache.shape, dtype=torch.float8_e4m3fn)
    cache.view(torch.uint8)[step.slots, :, 0] = step.kv.to(torch.float8_e4m3fn).view(torch.uint8)
    mass = mass_by_kernel(step.query, PagedKV.from_cache(cache), observe(step, 1), 0.125)
    assert (mass.double() - reference(step, observe(step, 1))).abs().max() < 1e-6
