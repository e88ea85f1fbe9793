"""One step of attention over live tokens: a cache as vLLM makes it, rows, metadata, a reference.

Everything but live tokens is NaN: a kernel that reads a dead or freed token gives itself away.
"""

from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup

from vtoken.integration.vllm.attention_gpu import attach_tables
from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.kv_pages import PagedKV

BLOCK, MAX_REQS, MAX_LEN = 16, 6, 256


def make_config(heads, kv_heads, dim, mode=CUDAGraphMode.NONE):
    """What vLLM's builders read of a configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: heads,
            get_num_kv_heads=lambda parallel: kv_heads,
            get_head_size=lambda: dim,
            rswa_window=None,
            is_mm_prefix_lm=False,
            max_model_len=MAX_LEN,
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(
            flash_attn_max_num_splits_for_cuda_graph=32,
            use_trtllm_attention=False,
            disable_flashinfer_q_quantization=True,
        ),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=[1, 2, 4],
            max_cudagraph_capture_size=4,
            static_forward_context={},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS, max_num_batched_tokens=512),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def make_group(backend, heads, kv_heads, dim, dtype=torch.bfloat16, mode=CUDAGraphMode.NONE):
    """An attention group, its metadata builder reading live tables, and these."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=dtype)
    group = AttentionGroup(backend, ["layer.0"], spec, 0)
    config = make_config(heads, kv_heads, dim, mode)
    group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=1)
    return group, attach_tables([group])


def make_cache(layout, kv_heads, dim, dtype, num_blocks):
    """One layer's cache with kernel blocks of one token, as vLLM allocates and splits it."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=dim, dtype=dtype)
    layer, block, *_ = compute_layout_strides(spec, num_blocks, 1, layout)
    raw = torch.zeros(spec.page_size_bytes * num_blocks, dtype=torch.int8)
    tensor = KVCacheTensor(
        size=raw.numel(), layers=["layer.0"], layer_stride=layer, block_stride=block
    )
    views = create_kv_cache_views(raw, spec, num_blocks, layout, tensor, kernel_block_size=1)
    return views[0]


def make_layer():
    """What implementations read of a layer."""
    one = torch.ones(1)
    return SimpleNamespace(layer_name="layer.0", _q_scale=one, _k_scale=one, _v_scale=one)


class Step:
    """A batch of ``lens`` live tokens, the last ``num_new`` of each new in this step.

    ``positions`` is how long a request is logically, over its live tokens.
    """

    def __init__(
        self,
        lens,
        num_new,
        heads=8,
        kv_heads=2,
        dim=64,
        dtype=torch.bfloat16,
        layout=KVCacheLayout.LBNHC,
        scattered=True,
    ):
        generator = torch.Generator().manual_seed(1)
        self.lens, self.num_new, self.heads, self.dim = lens, num_new, heads, dim
        num_slots = -(-sum(lens) // BLOCK) * BLOCK * 3
        self.cache = make_cache(layout, kv_heads, dim, dtype, num_slots // BLOCK)
        self.cache.fill_(float("nan"))
        self.kv = torch.randn(sum(lens), kv_heads, 2 * dim, generator=generator).to(dtype)
        self.query = torch.randn(sum(num_new), heads, dim, generator=generator).to(dtype)
        order = torch.randperm(num_slots, generator=generator)
        self.slots = (order if scattered else torch.arange(num_slots))[: sum(lens)]
        self.parts = list(torch.arange(sum(lens)).split(lens))
        new = [part[len(part) - n :] for part, n in zip(self.parts, num_new, strict=True)]
        self.new = torch.cat(new)
        old = torch.ones(sum(lens), dtype=torch.bool)
        old[self.new] = False
        self.cache[self.slots[old], :, 0] = self.kv[old]
        # Rows lie anywhere in the worker's table; what is behind their ends is a dead slot.
        self.rows = torch.randperm(MAX_REQS + 3, generator=generator)[: len(lens)]
        self.table = torch.full((MAX_REQS + 3, MAX_LEN), int(order[-1]), dtype=torch.int32)
        for row, part in zip(self.rows, self.parts, strict=True):
            self.table[row, : len(part)] = self.slots[part].int()

    def live(self):
        """The rows as the worker hands them in."""
        return LiveRows(self.table, self.rows, torch.tensor(self.lens))

    def common(self):
        """What vLLM says of the batch: positions and blocks, all of it wrong for us."""
        num_reqs, starts = len(self.lens), [0]
        for n in self.num_new:
            starts.append(starts[-1] + n)
        positional = torch.tensor([length + 30 for length in self.lens], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=positional,
            seq_lens_cpu_upper_bound=positional.clone(),
            num_reqs=num_reqs,
            num_actual_tokens=starts[-1],
            max_query_len=max(self.num_new),
            max_seq_len=int(positional.max()),
            block_table_tensor=torch.full((num_reqs, MAX_LEN // BLOCK), 10**6, dtype=torch.int32),
            slot_mapping=self.slots[self.new],
        )

    def run(self, group, impl, layer=None):
        """Write the new tokens, build the metadata, attend; the output."""
        layer = layer or make_layer()
        key, value = self.new_kv()
        group.metadata_builders[0].set_live_rows(self.live())
        metadata = group.build_metadata(self.common())
        impl.do_kv_cache_update(layer, key, value, self.cache, metadata.slot_mapping)
        output = torch.full_like(self.query, float("nan"))
        return impl.forward(layer, self.query, key, value, self.cache, metadata, output)

    def new_kv(self):
        """Keys and values of the new tokens, ``[num_tokens, kv_heads, dim]`` contiguous."""
        new = self.kv[self.new]
        return new[..., : self.dim].contiguous(), new[..., self.dim :].contiguous()

    def paged(self):
        """The cache as copies and scores see it."""
        return PagedKV.from_cache(self.cache)

    def reference(self, soft_cap=0.0):
        """Every query over its live tokens in float64."""
        results, first = [], 0
        for part, new in zip(self.parts, self.num_new, strict=True):
            group = self.heads // self.kv.shape[1]
            kv = self.kv[part].double().repeat_interleave(group, 1)
            key, value = kv[..., : self.dim], kv[..., self.dim :]
            for j in range(new):
                seen = len(part) - new + j + 1
                query = self.query[first + j].double()
                logits = torch.einsum("hd,lhd->hl", query, key[:seen]) * self.dim**-0.5
                if soft_cap:
                    logits = soft_cap * torch.tanh(logits / soft_cap)
                results.append(torch.einsum("hl,lhd->hd", logits.softmax(-1), value[:seen]))
            first += new
        return torch.stack(results)
