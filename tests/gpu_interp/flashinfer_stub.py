"""A ``flashinfer`` that can be imported and records what it is asked to plan; it computes nothing.

vLLM's FlashInfer backend makes its metadata on the host before any kernel: that part is real.
"""

import importlib.machinery
import sys
import types


class Wrapper:
    """Stands in for FlashInfer's prefill and decode wrappers."""

    is_cuda_graph_enabled = False

    def __init__(self, *args, **kwargs):
        self.plans = []

    def plan(self, **kwargs):
        self.plans.append(kwargs)


def get_seq_lens(indptr, last_page_len, page_size):
    """As FlashInfer documents it: tokens per request."""
    return (indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last_page_len


def install():
    """Call before vLLM's FlashInfer backend is imported."""
    names = {
        "": {
            "BatchAttentionWithAttentionSinkWrapper": Wrapper,
            "BatchDecodeWithPagedKVCacheWrapper": Wrapper,
            "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
            "BatchPrefillWithRaggedKVCacheWrapper": Wrapper,
            "get_seq_lens": get_seq_lens,
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": None,
        },
        ".decode": {"fast_decode_plan": None, "trtllm_batch_decode_with_kv_cache": None},
        ".prefill": {"trtllm_batch_context_with_kv_cache": None},
        ".utils": {"FP4Tensor": None},
    }
    for suffix, content in names.items():
        name = f"flashinfer{suffix}"
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
