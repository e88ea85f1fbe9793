"""What a GPU worker proves about its device once it has a cache: copies, reads, scores.

On the engine's own cache, in its layout and dtype, through the layer and the kernels that will
serve. Everything but live tokens is NaN while reads are checked, so a kernel that looks elsewhere
gives itself away. The cache is empty at that time, and zero again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.copy_engine.cuda import CudaCopyEngine
from vtoken.device_check import (
    Finding,
    check_copies,
    check_order,
    dense_attention,
    poison,
)
from vtoken.gpu_scores.mass import ObservedQueries, mass_by_index
from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.gpu_side import fp8_scales
from vtoken.integration.vllm.gpu_core import GpuCore
from vtoken.kv_pages import PagedKV

READ_LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest error of attention over unit-normal numbers, by the model's dtype; a wrong token is off
by about 1. On CUDA, float32 is multiplied as TF32."""
FP8_READ_LIMIT = 0.4
"""Queries and keys are rounded to three bits."""
FP8_STORE_LIMIT = 0.3
SCORE_LIMIT = 1e-4

_LENS = (37, 70, 20)
_BATCHES = {"prefill": _LENS, "decode": (1, 1, 1), "mixed": (1, 20, 1)}
"""New tokens of each request in a step, by name."""


@dataclass(frozen=True, eq=False)
class _Placed:
    """Requests and where their tokens lie.

    Attributes:
        lens: live tokens of each request.
        slots: int64, all tokens, requests one after the other.
    """

    lens: tuple[int, ...]
    slots: torch.Tensor

    def live(self) -> LiveRows:
        """One row per request; behind its end lies a slot of nobody."""
        table = torch.zeros(len(self.lens), max(self.lens), dtype=torch.int32)
        for row, part in zip(table, self.slots.cpu().split(self.lens), strict=True):
            row[: len(part)] = part.int()
        device = self.slots.device
        rows, lens = torch.arange(len(self.lens)), torch.tensor(self.lens)
        return LiveRows(table.to(device), rows.to(device), lens.to(device))


class PartsCheck:
    """See the module.

    Args:
        runner: our GPU runner, its cache initialised.
        gpu: its core.
    """

    def __init__(self, runner: Any, gpu: GpuCore) -> None:
        self._runner = runner
        self._gpu = gpu
        self._name = next(iter(gpu.layers))
        self._layer = runner.attention_layers([self._name])[self._name]
        self._impl = self._layer.impl
        self._cache: PagedKV = gpu.layers[self._name]
        self._is_fp8 = self._cache.cache.dtype == torch.float8_e4m3fn
        generator = torch.Generator().manual_seed(0)
        self._lens = self._fitting()
        shapes = [(sum(self._lens), n, self._impl.head_size) for n in self._heads]
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        self._query, self._key, self._value = (x.to(runner.dtype).to(runner.device) for x in made)

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self._impl.num_heads, self._impl.num_kv_heads, self._impl.num_kv_heads

    def _fitting(self) -> tuple[int, ...]:
        """Requests that the engine's limits allow, at least one."""
        runner, room = self._runner, min(self._runner.max_num_tokens, self._cache.num_slots // 4)
        lens = [min(n, runner.max_model_len) for n in _LENS[: runner.max_num_reqs]]
        while len(lens) > 1 and sum(lens) > room:
            lens.pop()
        return tuple(min(n, room) for n in lens)

    @torch.inference_mode()
    def findings(self) -> Iterator[Finding]:
        """All of them, in order; NaN in a value is a failed one."""
        pool, streams = self._gpu.pool, self._gpu.tools.streams
        # An interpreter on a CPU needs a millisecond for what a GPU does in a nanosecond.
        moves, rounds, moves_each = (512, 20, 2048) if pool.device.type == "cuda" else (48, 3, 8)
        yield from check_copies(pool, CudaCopyEngine(pool, streams), moves)
        yield check_order(pool, CudaCopyEngine(pool, streams), rounds, moves_each)
        try:
            yield from self._reads()
            yield from self._scores()
        finally:
            self._cache.words.zero_()

    def _reads(self) -> Iterator[Finding]:
        """Each kind of step over scattered tokens and over compacted ones."""
        outputs = {}
        for place in ("scattered", "compacted"):
            poison(self._cache)
            placed = self._placed(place == "scattered")
            for name, most in _BATCHES.items():
                num_new = tuple(min(n, m) for n, m in zip(most, self._lens, strict=False))
                outputs[name, place] = self._attend(placed, num_new)
                error = (outputs[name, place].float() - self._reference(placed, num_new)).abs()
                limit = FP8_READ_LIMIT if self._is_fp8 else READ_LIMITS[self._runner.dtype]
                yield Finding(f"error of a {name} over {place} tokens", float(error.max()), limit)
            yield self._stored(placed)
        for name in _BATCHES:
            differs = (outputs[name, "scattered"] != outputs[name, "compacted"]).sum()
            note = f"of {outputs[name, 'scattered'].numel()}"
            what = f"numbers of a {name} that depend on where tokens lie"
            yield Finding(what, float(differs), note=note)

    def _placed(self, is_scattered: bool) -> _Placed:
        num_slots, total = self._cache.num_slots, sum(self._lens)
        slots = np.arange(num_slots - total, num_slots)
        if is_scattered:
            slots = np.random.default_rng(2).choice(num_slots, total, replace=False)
        return _Placed(self._lens, torch.from_numpy(slots).to(self._runner.device))

    def _newest(self, num_new: Sequence[int]) -> torch.Tensor:
        """Which tokens are new in a step: the last ones of each request."""
        ends = np.cumsum(self._lens)
        parts = [np.arange(end - n, end) for end, n in zip(ends, num_new, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(self._runner.device)

    def _attend(self, placed: _Placed, num_new: tuple[int, ...]) -> torch.Tensor:
        """What the layer answers, called as the model calls it; ``[num_tokens, heads, head]``."""
        new = self._newest(num_new)
        (group,) = self._runner.attention_groups()
        lens = torch.tensor(self._lens)
        for builder in group.metadata_builders:
            builder.set_live_rows(placed.live(), lens_cpu=lens)
        metadata = group.build_metadata(self._common(placed, num_new, new))
        query, key, value = (part[new].flatten(1) for part in (self._query, self._key, self._value))
        with set_forward_context(
            {self._name: metadata},
            self._runner.vllm_config,
            num_tokens=len(new),
            slot_mapping={self._name: placed.slots[new]},
        ):
            output: torch.Tensor = self._layer(query, key, value)
        return output.view(len(new), self._impl.num_heads, -1)

    def _common(
        self, placed: _Placed, num_new: tuple[int, ...], new: torch.Tensor
    ) -> CommonAttentionMetadata:
        """What vLLM says of the batch; its blocks and positions are not those of live tokens."""
        starts = torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32)
        positions = torch.tensor(self._lens, dtype=torch.int32) + self._cache.cache.shape[2]
        device = self._runner.device
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=positions.to(device),
            seq_lens_cpu_upper_bound=positions,
            num_reqs=len(num_new),
            num_actual_tokens=len(new),
            max_query_len=max(num_new),
            max_seq_len=int(positions.max()),
            block_table_tensor=torch.zeros(len(num_new), 1, dtype=torch.int32, device=device),
            slot_mapping=placed.slots[new],
        )

    def _held(self, placed: _Placed) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the cache holds them, float32 ``[num_tokens, kv_heads, head]``."""
        blocks, offsets = self._cache.locate(placed.slots)
        key, value = (
            part[blocks, :, offsets].float() for part in (self._cache.key, self._cache.value)
        )
        if self._is_fp8:
            key_scale, value_scale = fp8_scales(self._layer)
            key, value = key * key_scale, value * value_scale
        return key, value

    def _reference(self, placed: _Placed, num_new: tuple[int, ...]) -> torch.Tensor:
        key, value = (part.split(self._lens) for part in self._held(placed))
        query = self._query.split(self._lens)
        cap = float(self._impl.logits_soft_cap or 0.0)
        return torch.cat(
            [
                dense_attention(q[len(q) - n :], k, v, float(self._impl.scale), cap)
                for q, k, v, n in zip(query, key, value, num_new, strict=True)
            ]
        )

    def _stored(self, placed: _Placed) -> Finding:
        """What vLLM wrote, found where the token layer looks for it."""
        key, value = self._held(placed)
        errors = [key - self._key.float(), value - self._value.float()]
        error = torch.stack([part.abs().max() for part in errors]).max()
        limit = FP8_STORE_LIMIT if self._is_fp8 else 0.0
        return Finding("error of keys and values in the cache", float(error), limit)

    def _scores(self) -> Iterator[Finding]:
        """The score kernel against torch, and against itself: equal rows give equal bits."""
        name = next(iter(self._gpu.scales), None)
        if name is None:
            return
        scale = self._gpu.scales[name]
        placed = self._placed(is_scattered=False)
        live, ends = placed.live(), torch.from_numpy(np.cumsum(self._lens) - 1)
        device = self._runner.device
        observed = ObservedQueries(
            places=ends[:, None].to(device),
            table=live.table,
            rows=live.rows,
            lens=live.lens[:, None],
            width=max(self._lens),
        )
        scorer = self._gpu.tools.scorer
        masses = [
            of(self._query, self._cache, observed, scale.scale, scale.soft_cap)
            for of in (scorer, scorer, mass_by_index)
        ]
        error = (masses[0] - masses[2]).abs().max()
        yield Finding("error of scores against torch", float(error), SCORE_LIMIT)
        repeated = (masses[0] != masses[1]).sum()
        yield Finding("scores that differ when repeated", float(repeated))
