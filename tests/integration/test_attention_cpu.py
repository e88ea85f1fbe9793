"""Attention over live slots against a float64 reference, through ops and through the fallback."""

import logging

import numpy as np
import pytest
import torch

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm import attention_kernels
from vtoken.integration.vllm.attention_cpu import LiveCPUAttention, LiveCPUMetadataBuilder
from vtoken.integration.vllm.attention_kernels import (
    HeadShape,
    OpAttention,
    SdpaAttention,
    choose_attention,
)
from vtoken.integration.vllm.attention_metadata import (
    LiveRows,
    make_metadata,
    positional_rows,
)
from vtoken.integration.vllm.compat import cpu_ops
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_view import SlotGeometry, SplitKV

SIZE = 16
needs_ops = pytest.mark.skipif(
    not cpu_ops.has_slot_attention_ops(), reason="this vLLM build has no slot attention ops"
)


class Case:
    """A cache, rows scattered over it, and one step's new tokens, already written."""

    def __init__(self, shape, dtype, lens, num_new, seed=0, scattered=True, poison=False):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.dtype, self.num_new = shape, dtype, num_new
        geometry = SlotGeometry(SIZE, shape.num_kv_heads, shape.head_size)
        num_blocks = -(-sum(lens) // SIZE) * 2 + 2
        size = (num_blocks, shape.num_kv_heads, SIZE, 2 * shape.head_size)
        self.views = SplitKV.from_cache(torch.zeros(size).to(dtype))
        order = np.random.default_rng(seed).permutation(num_blocks * SIZE)
        if not scattered:
            order = np.arange(num_blocks * SIZE)
        slots = order[: sum(lens)].astype(np.int32)
        if poison:
            self.views.rows.fill_(float("nan"))
        total = sum(num_new)
        kv = torch.randn(2, sum(lens), shape.num_kv_heads, shape.head_size, generator=generator)
        self.query = torch.randn(total, shape.num_heads, shape.head_size, generator=generator)
        self.query, self.kv = self.query.to(dtype), kv.to(dtype)
        rows = SlotRows(len(lens), max(lens), geometry)
        rows.table.fill_(int(geometry.kernel_slots(order[-1:])[0]))  # stale ends: a dead slot
        self.parts, new_slots, start = [], [], 0
        for i, (length, new) in enumerate(zip(lens, num_new, strict=True)):
            part = slice(start, start + length)
            self.parts.append(part)
            rows.set_row(str(i), slots[part])
            new_slots.append(slots[part][length - new :])
            start += length
        index = geometry.token_rows(torch.from_numpy(slots).long())
        values = torch.stack([self.kv[0], self.kv[1]], 2)  # [tokens, H, 2, D]
        self.views.rows[index.reshape(-1)] = values.reshape(-1, shape.head_size)
        numbers = rows.rows([str(i) for i in range(len(lens))])
        live = LiveRows(rows.table, torch.from_numpy(numbers), torch.from_numpy(rows.lens(numbers)))
        starts = torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32)
        self.metadata = make_metadata(
            geometry,
            shape.num_heads,
            live,
            starts,
            torch.from_numpy(np.concatenate(new_slots)).long(),
        )

    def new_tokens(self, which):
        """This step's K (0) or V (1), ``[num_tokens, H, D]``."""
        parts = zip(self.parts, self.num_new, strict=True)
        return torch.cat([self.kv[which][p][p.stop - p.start - n :] for p, n in parts])

    def run(self, attention):
        output = torch.full_like(self.query, float("nan"))
        key, value = self.new_tokens(0), self.new_tokens(1)
        attention.attend(self.query, key, value, self.views, self.metadata, output)
        return output

    def reference(self):
        """Every query over its live tokens, float64, one at a time."""
        shape, results, first = self.shape, [], 0
        group = shape.num_heads // shape.num_kv_heads
        for part, new in zip(self.parts, self.num_new, strict=True):
            key, value = (self.kv[i][part].double().repeat_interleave(group, 1) for i in (0, 1))
            for j in range(new):
                seen = len(key) - new + j + 1
                query = self.query[first + j].double()
                logits = torch.einsum("hd,lhd->hl", query, key[:seen]) * shape.scale
                if shape.soft_cap:
                    logits = shape.soft_cap * torch.tanh(logits / shape.soft_cap)
                results.append(torch.einsum("hl,lhd->hd", logits.softmax(-1), value[:seen]))
            first += new
        return torch.stack(results)


def make_shape(heads=6, kv_heads=2, dim=64, soft_cap=0.0):
    return HeadShape(heads, kv_heads, dim, dim**-0.5, soft_cap)


STEPS = {
    "decode": ([1, 17, 130], [1, 1, 1]),
    "prefill": ([40, 7], [40, 7]),
    "extend": ([90, 50], [33, 2]),
    "mixed": ([130, 20, 70, 45], [1, 1, 30, 45]),
    "one-token prompt behind an extend": ([20, 64, 1], [1, 40, 1]),
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
STEP = pytest.mark.parametrize(("lens", "num_new"), STEPS.values(), ids=STEPS)
HEADS = pytest.mark.parametrize(
    "shape",
    [make_shape(9, 3, 64), make_shape(4, 4, 96), make_shape(8, 1, 128), make_shape(2, 2, 256)],
    ids=["gqa 9/3x64", "mha 4x96", "mqa 8/1x128", "mha 2x256"],
)


def assert_close(output, reference):
    error = (output.double() - reference).abs().max().item()
    assert error < TOLERANCE[output.dtype], f"max error {error}"


@needs_ops
@STEP
@HEADS
def test_ops_match_the_reference_on_scattered_slots(shape, lens, num_new):
    """The bf16 ops read exactly the live tokens, in all kinds of step and head layouts."""
    case = Case(shape, torch.bfloat16, lens, num_new)
    assert_close(case.run(OpAttention(shape)), case.reference())


@STEP
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 80])
def test_fallback_matches_the_reference_on_scattered_slots(dtype, dim, lens, num_new):
    """Gather and SDPA serve every dtype and head size."""
    case = Case(make_shape(dim=dim), dtype, lens, num_new)
    assert_close(case.run(SdpaAttention(case.shape)), case.reference())


@STEP
def test_soft_cap_matches_the_reference(lens, num_new):
    """Capped logits, as Gemma 2 asks for, go through the fallback."""
    case = Case(make_shape(soft_cap=0.7), torch.bfloat16, lens, num_new)
    assert_close(case.run(SdpaAttention(case.shape)), case.reference())


@STEP
@pytest.mark.parametrize("kernel", [pytest.param(OpAttention, marks=needs_ops), SdpaAttention])
def test_output_bits_do_not_depend_on_where_tokens_lie(kernel, lens, num_new):
    """Scattered and compacted slots give the same bits: what makes relocation invisible."""
    shape = make_shape()
    runs = [
        Case(shape, torch.bfloat16, lens, num_new, scattered=scattered).run(kernel(shape))
        for scattered in (True, False)
    ]
    assert torch.equal(*runs)


@STEP
@pytest.mark.parametrize("kernel", [pytest.param(OpAttention, marks=needs_ops), SdpaAttention])
def test_dead_slots_do_not_matter_even_if_they_hold_nan(kernel, lens, num_new):
    """Evicted and never written slots are not read at all."""
    shape = make_shape()
    clean = Case(shape, torch.bfloat16, lens, num_new).run(kernel(shape))
    poisoned = Case(shape, torch.bfloat16, lens, num_new, poison=True).run(kernel(shape))
    assert torch.equal(clean, poisoned)


@needs_ops
def test_decode_bits_do_not_depend_on_the_neighbours():
    """The split of the decode op is fixed, so a request's bits are its own."""
    shape = make_shape(9, 3, 64)
    lens = [700, 33, 250, 90]
    together = Case(shape, torch.bfloat16, lens, [1] * 4)
    output = together.run(OpAttention(shape))
    for i, length in enumerate(lens):
        live = together.metadata.live
        metadata = make_metadata(
            together.views.geometry,
            shape.num_heads,
            LiveRows(live.table, live.rows[i : i + 1], live.lens[i : i + 1]),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([0]),
        )
        alone = torch.empty_like(output[:1])
        key, value = (together.kv[w][together.parts[i]][length - 1 :] for w in (0, 1))
        query = together.query[i : i + 1]
        OpAttention(shape).attend(query, key, value, together.views, metadata, alone)
        assert torch.equal(alone[0], output[i])


def test_decodes_beyond_the_gather_limit_go_in_groups(monkeypatch):
    """The fallback bounds its memory; the result is the same."""
    case = Case(make_shape(), torch.float32, [60, 1, 35, 90], [1] * 4)
    whole = case.run(SdpaAttention(case.shape))
    monkeypatch.setattr(attention_kernels, "_GATHER_BYTES", 1)
    assert_close(case.run(SdpaAttention(case.shape)), whole.double())


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        (torch.float32, make_shape(), "bfloat16, not torch.float32"),
        (torch.float16, make_shape(), "bfloat16, not torch.float16"),
        (torch.bfloat16, make_shape(dim=80), "not 80"),
        (torch.bfloat16, make_shape(soft_cap=50.0), "soft cap, here 50.0"),
    ],
)
@needs_ops
def test_choice_falls_back_and_says_why(caplog, monkeypatch, dtype, shape, reason):
    """The reason is logged once, however many layers there are."""
    monkeypatch.setattr(attention_kernels, "_logged", set())
    with caplog.at_level(logging.WARNING):
        kernels = [choose_attention(shape, dtype) for _ in range(3)]
    assert all(isinstance(kernel, SdpaAttention) for kernel in kernels)
    assert len(caplog.records) == 1
    assert reason in caplog.text


@needs_ops
def test_choice_takes_the_ops_where_they_are_right(caplog):
    """bf16 with a checked head size needs no fallback and no log line."""
    assert isinstance(choose_attention(make_shape(), torch.bfloat16), OpAttention)
    assert caplog.text == ""


def test_metadata_counts_only_leading_decodes():
    """One-token prompts that vLLM sorts behind prefills stay among the extends."""
    _, num_new = STEPS["one-token prompt behind an extend"]
    case = Case(make_shape(), torch.bfloat16, *STEPS["one-token prompt behind an extend"])
    metadata = case.metadata
    assert metadata.num_decodes == 1
    assert metadata.extend_lens.tolist() == num_new[1:]
    assert metadata.extend_starts.tolist() == [0, 40]
    assert metadata.max_extend_len == 40


def test_dummy_runs_write_nothing():
    """vLLM marks padding with slot -1; such a step has no rows to write."""
    case = Case(make_shape(), torch.bfloat16, [3], [3])
    metadata = make_metadata(
        case.views.geometry,
        6,
        case.metadata.live,
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([-1, -1, -1]),
    )
    assert metadata.key_rows is None


def test_positional_rows_follow_the_block_table():
    """Without rows every position is live, in block order."""
    geometry = SlotGeometry(SIZE, 2, 64)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    live = positional_rows(geometry, table, torch.tensor([20, 5]))
    slots = geometry.canonical_slots(live.table)
    assert live.table.dtype == torch.int32
    assert slots[0].tolist() == [*range(48, 64), *range(16, 32)]
    assert live.rows.tolist() == [0, 1]
    assert live.lens.tolist() == [20, 5]


def test_builder_uses_rows_for_one_step_only():
    """A dummy run that follows a real step must not read through its rows."""

    class Common:
        num_reqs, num_actual_tokens, max_seq_len = 1, 1, 20
        query_start_loc_cpu = torch.tensor([0, 1], dtype=torch.int32)
        slot_mapping = torch.tensor([37, -1])
        block_table_tensor = torch.tensor([[3, 1, 0, 0]], dtype=torch.int32)
        seq_lens = torch.tensor([20])

    builder = object.__new__(LiveCPUMetadataBuilder)
    builder.geometry, builder._num_heads, builder._live = SlotGeometry(SIZE, 2, 64), 6, None
    live = LiveRows(torch.zeros(4, 64, dtype=torch.int32), torch.tensor([2]), torch.tensor([9]))
    builder.set_live_rows(live)
    assert builder.build(0, Common).live is live
    dummy = builder.build(0, Common)
    assert dummy.live.lens.tolist() == [20]
    assert dummy.num_tokens == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"sliding_window": 128}, "a sliding window of 128"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache dtype fp8_e4m3"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "KV sharing with layers.0"),
        ({"sinks": torch.zeros(6)}, "learned attention sinks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_that_rows_cannot_express_are_refused(arguments, reason):
    """Wrong results are not an option: the reason is named."""
    with pytest.raises(UnsupportedError, match=reason):
        LiveCPUAttention(6, 64, 0.125, 2, **arguments)
