"""What FlashInfer's native kernels are told: exactly the live slots, as pages of one token.

The kernels themselves need a GPU; planning them is host code of vLLM's, over our rows.
"""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch


def _neighbour(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_neighbour("flashinfer_stub").install()
case = _neighbour("attention_case")

from vllm.v1.attention.backends import flashinfer as stock  # noqa: E402
from vllm.v1.attention.backends.utils import PerLayerParameters  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from vtoken.errors import UnsupportedError  # noqa: E402
from vtoken.integration.vllm.attention_gpu_flashinfer import (  # noqa: E402
    LiveFlashInferBackend,
    LiveFlashInferBuilder,
)

SHAPE = (8, 2, 64)


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """No TensorRT-LLM kernels, as the engine is told; no layers to ask for their parameters."""
    parameters = PerLayerParameters(-1, None, 0.125)
    monkeypatch.setattr(stock, "get_per_layer_parameters", lambda *args: {"layer.0": parameters})
    monkeypatch.setattr(stock, "can_use_trtllm_attention", lambda *args, **kwargs: False)
    monkeypatch.setattr(stock, "use_trtllm_attention", lambda *args, **kwargs: False)
    monkeypatch.setattr(stock, "pin_host_range_buf", lambda length: None)
    monkeypatch.setattr(
        LiveFlashInferBuilder, "kv_cache_layout", property(lambda self: KVCacheLayout.LBNHC)
    )


def plan_of(part):
    """What the wrapper of one half of the batch was told, once."""
    (plan,) = part.wrapper.plans
    return plan


def check(plan, step, requests, names):
    """Pages of one token: every live slot of these requests, in logical order."""
    indptr, indices, last = (plan[name] for name in names)
    starts = indptr.tolist()
    assert plan["page_size"] == 1
    assert [b - a for a, b in itertools.pairwise(starts)] == [step.lens[i] for i in requests]
    for i, start, end in zip(requests, starts, starts[1:], strict=False):
        assert torch.equal(indices[start:end].long(), step.slots[step.parts[i]])
    assert last.tolist() == [1] * len(requests)
    assert plan["seq_lens"].tolist() == [step.lens[i] for i in requests]


def test_decodes_and_prefills_are_planned_over_live_slots():
    """A mixed batch, decodes first; positions, much longer, appear nowhere."""
    group, _ = case.make_group(LiveFlashInferBackend, *SHAPE)
    step = case.Step([7, 40, 33, 20], [1, 1, 12, 20], *SHAPE)
    group.metadata_builders[0].set_live_rows(step.live())
    metadata = group.build_metadata(step.common())
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    decode_names = ("indptr", "indices", "last_page_len")
    check(plan_of(metadata.decode), step, [0, 1], decode_names)
    prefill_names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    check(plan_of(metadata.prefill), step, [2, 3], prefill_names)


def test_kernels_that_read_larger_pages_are_refused(monkeypatch):
    """XQA or TensorRT-LLM decode: the message says which option turns them off."""
    monkeypatch.setattr(stock, "can_use_trtllm_attention", lambda *args, **kwargs: True)
    kernel = stock.FlashInferDecodeKernel.XQA
    monkeypatch.setattr(
        stock.FlashInferMetadataBuilder,
        "_get_flashinfer_trtllm_api_decode_kernel",
        staticmethod(lambda: kernel),
    )
    with pytest.raises(UnsupportedError, match="use_trtllm_attention=false"):
        case.make_group(LiveFlashInferBackend, *SHAPE)


def test_vllm_is_told_pages_of_one_token():
    """And only caches that were proven."""
    assert LiveFlashInferBackend.get_supported_kernel_block_sizes() == [1]
    assert LiveFlashInferBackend.supports_kv_cache_dtype("bfloat16")
    assert not LiveFlashInferBackend.supports_kv_cache_dtype("fp8")
