"""The relocation kernel is byte-exact in all layouts and dtypes, and serves the CUDA engine."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from vtoken.copy_engine.cuda import CudaCopyEngine
from vtoken.copy_engine.triton_kernels import move_by_kernel
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool, move_by_index

TESTS = Path(__file__).parents[2]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


make_views = _load(TESTS / "test_kv_pages.py").make_views
cuda_tests = _load(TESTS / "copy_engine" / "test_cuda.py")


class TestCudaEngineWithTheKernel(cuda_tests.contract.CopyEngineContract):
    """The contract of copy engines, with the kernel that CUDA runs."""

    @pytest.fixture
    def pool(self):
        return cuda_tests.make_paged_pool(move_by_kernel)

    def make_engine(self, pool):
        return CudaCopyEngine(pool, cuda_tests.fakes.FakeStreams())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("kernel_block", [16, 1])
def test_kernel_moves_the_same_bytes_as_torch(layout, dtype, kernel_block):
    """uint8 stands for fp8, which vLLM stores as bytes; NaN patterns must survive."""
    if kernel_block == 1 and layout not in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
        return  # vLLM has no such views
    views = make_views(layout, dtype, kernel_block)
    base = views[0]
    twins = base.clone(), views[1].clone()
    kernel = PagedPool([PagedKV.from_cache(view) for view in views], move_by_kernel)
    torch_pool = PagedPool([PagedKV.from_cache(twin) for twin in twins], move_by_index)
    order = torch.randperm(kernel.num_slots)
    src, dst = order[:19], order[19:38]
    kernel.copy(src, dst)
    torch_pool.copy(src, dst)
    everything = torch.arange(kernel.num_slots)
    assert kernel.digest(everything) == torch_pool.digest(everything)


@pytest.mark.parametrize("heads", [1, 3])
def test_tokens_larger_than_a_tile_are_moved_in_parts(monkeypatch, heads):
    """Widths and head counts that are no powers of two, tile after tile."""
    monkeypatch.setattr("vtoken.copy_engine.triton_kernels._TILE_WORDS", 16)
    cache = torch.randn(6, heads, 4, 2 * 36)
    layers = [PagedKV.from_cache(cache)]
    before = layers[0].gather(torch.arange(24))
    PagedPool(layers, move_by_kernel).copy(torch.tensor([1, 22]), torch.tensor([9, 2]))
    expected = before.clone()
    expected[[9, 2]] = before[[1, 22]]
    assert torch.equal(layers[0].gather(torch.arange(24)), expected)
