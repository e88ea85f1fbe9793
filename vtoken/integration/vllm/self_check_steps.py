"""What a GPU worker proves about whole steps, once graphs are captured and before it serves.

Two requests of its own go through the model runner, as the scheduler would send them::

    whole      prompt in one step
    split      all but the last token, then that one and another: decodes, replayed from graphs
    evicted    split; half of the old tokens are NaN before the decodes, rows do not name them
    moved      evicted; the copy engine moves the other half, and before the second decode, which
               reads the destinations, the sources are NaN too

A decode must see what the prompt in one step saw (a graph that reads the lengths or the table of
its capture does not), must not see what was evicted, and must not depend on where tokens lie by a
bit. The requests leave no trace: rows are dropped, slots are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vtoken.device_check import Finding, poison
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.messages import ATTRIBUTE, EMPTY_ROW, RelocationBatch, StepMessage
from vtoken.paged_pool import PagedPool
from vtoken.types import SlotArray

SPLIT_LIMITS = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Relative error of hidden states between a decode and a prefill of the same token, by the
model's dtype: other kernels, other rounding, layer by layer."""
FP8_SPLIT_LIMIT = 0.4

_FULL_BLOCKS = 2
"""Blocks of each request that are not written any more when its last token is decoded."""


@dataclass(frozen=True, eq=False)
class _Request:
    """One of the check's requests in one run.

    Attributes:
        req_id: of this run.
        tokens: its prompt.
        blocks: of the scheduler.
        spare: blocks to move tokens to.
    """

    req_id: str
    tokens: list[int]
    blocks: list[int]
    spare: list[int]


@dataclass(frozen=True, eq=False)
class _Run:
    """What is done with the requests of a run besides the steps."""

    name: str
    evicts: bool = False
    moves: bool = False


class StepsCheck:
    """See the module.

    Args:
        runner: our GPU runner, warmed up, without requests.
        pool: of all layers.

    Raises:
        UnsupportedError: the pool is too small to check anything.
    """

    def __init__(self, runner: Any, pool: PagedPool) -> None:
        self._runner = runner
        self._pool = pool
        self._block = runner.cache_config.block_size
        self._length = _FULL_BLOCKS * self._block + self._block // 2
        self._num_reqs = min(2, runner.max_num_reqs, runner.max_num_tokens // self._length)
        needed = 1 + self._num_reqs * (2 * _FULL_BLOCKS + 1)
        if self._num_reqs < 1 or self._length >= runner.max_model_len:
            raise UnsupportedError(
                f"vToken cannot check a device with requests of {self._length} tokens within "
                f"max_model_len={runner.max_model_len} and "
                f"max_num_batched_tokens={runner.max_num_tokens}"
            )
        if pool.num_slots < needed * self._block:
            raise UnsupportedError(
                f"a KV cache of {pool.num_slots} tokens is too small: vToken's check needs "
                f"{needed * self._block}"
            )
        self._ticket = 0

    @torch.inference_mode()
    def findings(self) -> Iterator[Finding]:
        """All of them, in order."""
        whole = self._whole(self._requests("whole"))
        split = self._run(_Run("split"))
        error = float((split[0] - whole).norm() / whole.norm())
        is_fp8 = self._pool.layers[0].cache.dtype == torch.float8_e4m3fn
        limit = FP8_SPLIT_LIMIT if is_fp8 else SPLIT_LIMITS[self._runner.dtype]
        yield Finding("relative error of a decode against its prompt in one step", error, limit)
        evicted = self._run(_Run("evicted", evicts=True))
        strange = (~torch.isfinite(torch.stack(evicted))).sum()
        yield Finding("numbers of a decode that are not finite after an eviction", float(strange))
        same = torch.equal(evicted[0], split[0])
        yield Finding("evictions that change nothing", float(same))
        moved = self._run(_Run("moved", evicts=True, moves=True))
        for when, of, expected in zip(("while", "after"), moved, evicted, strict=True):
            differs, note = (of != expected).sum(), f"of {expected.numel()}"
            name = f"numbers of a decode that changed {when} tokens were moved"
            yield Finding(name, float(differs), note=note)

    def _requests(self, run: str) -> list[_Request]:
        """Random prompts, the same ones in every run, in blocks of their own."""
        vocabulary = self._runner.model_config.get_vocab_size()
        tokens = np.random.default_rng(0).integers(0, vocabulary, (self._num_reqs, self._length))
        each = 2 * _FULL_BLOCKS + 1
        made = []
        for i in range(self._num_reqs):
            blocks = list(range(1 + i * each, 1 + (i + 1) * each))  # block 0 is the null block
            own, spare = blocks[: _FULL_BLOCKS + 1], blocks[_FULL_BLOCKS + 1 :]
            made.append(_Request(f"_vtoken_{run}_{i}", tokens[i].tolist(), own, spare))
        return made

    def _whole(self, requests: list[_Request]) -> torch.Tensor:
        """Hidden states of the last token of each prompt, ``[num_reqs, hidden]``."""
        hidden = self._prefill(requests, self._length)
        self._finish(requests)
        return hidden.view(len(requests), self._length, -1)[:, -1]

    def _run(self, run: _Run) -> list[torch.Tensor]:
        """Hidden states of two decodes, ``[num_reqs, hidden]`` each."""
        requests = self._requests(run.name)
        kept = {r.req_id: self._kept(r, run.evicts) for r in requests}
        moved = {r.req_id: self._moved(r, kept[r.req_id]) for r in requests}
        batch = self._batch(kept, moved) if run.moves else None
        self._prefill(requests, self._length - 1, batch)
        if run.evicts:
            self._poison(requests, kept)
        first = self._decode(requests, self._length - 1, kept if run.evicts else {})
        if run.moves:
            self._poison(requests, moved)
            # The first decode appended its token.
            moved = {r.req_id: np.append(moved[r.req_id], self._slots(r)[-1]) for r in requests}
        second = self._decode(requests, self._length, moved if run.moves else {})
        self._finish(requests)
        return [first, second]

    def _slots(self, request: _Request) -> SlotArray:
        """Where the tokens of the prompt lie."""
        slots = np.array(request.blocks)[:, None] * self._block + np.arange(self._block)
        found: SlotArray = slots.reshape(-1)[: self._length].astype(np.int32)
        return found

    def _kept(self, request: _Request, evicts: bool) -> SlotArray:
        """Slots before the first decode: every second one of the full blocks, and the newest."""
        slots, full = self._slots(request)[:-1], _FULL_BLOCKS * self._block
        return np.concatenate([slots[:full:2], slots[full:]]) if evicts else slots

    def _moved(self, request: _Request, kept: SlotArray) -> SlotArray:
        """``kept`` with what lies in full blocks packed into spare ones, from behind."""
        is_open = kept // self._block == request.blocks[-1]
        spare = np.array(request.spare)[:, None] * self._block + np.arange(self._block)
        row = kept.copy()
        row[~is_open] = spare.reshape(-1)[::-1][: int((~is_open).sum())]
        return row

    def _batch(
        self, kept: Mapping[str, SlotArray], moved: Mapping[str, SlotArray]
    ) -> RelocationBatch:
        src, dst = (np.concatenate(list(rows.values())) for rows in (kept, moved))
        is_move = src != dst
        bounds = (0, *(int(n) for n in np.cumsum([len(row) for row in kept.values()])))
        bounds = tuple(int(is_move[:bound].sum()) for bound in bounds)
        self._ticket += 1
        return RelocationBatch(self._ticket, tuple(kept), bounds, src[is_move], dst[is_move])

    def _poison(self, requests: list[_Request], rows: Mapping[str, SlotArray]) -> None:
        """Make every slot of the requests' own blocks NaN that their row does not name."""
        for request in requests:
            dead = np.setdiff1d(self._slots(request)[:-1], rows[request.req_id])
            slots = torch.from_numpy(dead.astype(np.int64)).to(self._pool.device)
            for layer in self._pool.layers:
                poison(layer, slots)

    def _prefill(
        self, requests: list[_Request], num_tokens: int, batch: RelocationBatch | None = None
    ) -> torch.Tensor:
        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=request.tokens,
                mm_features=[],
                sampling_params=SamplingParams(max_tokens=4, temperature=0.0),
                pooling_params=None,
                block_ids=(request.blocks,),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=request.tokens,
            )
            for request in requests
        ]
        rows = dict.fromkeys((request.req_id for request in requests), EMPTY_ROW)
        return self._step(step, requests, num_tokens, StepMessage(rows=rows, relocation=batch))

    def _decode(
        self, requests: list[_Request], computed: int, rows: Mapping[str, SlotArray]
    ) -> torch.Tensor:
        """One token each, of which ``computed`` precede it."""
        step = SchedulerOutput.make_empty()
        cached = CachedRequestData.make_empty()
        cached.req_ids = [request.req_id for request in requests]
        cached.num_computed_tokens = [computed] * len(requests)
        cached.num_output_tokens = [max(0, computed + 1 - self._length)] * len(requests)
        cached.new_block_ids = [None] * len(requests)
        step.scheduled_cached_reqs = cached
        return self._step(step, requests, 1, StepMessage(rows=rows))

    def _step(
        self, step: Any, requests: list[_Request], num_tokens: int, message: StepMessage
    ) -> torch.Tensor:
        """Hidden states of all new tokens, ``[num_reqs * num_tokens, hidden]`` float32."""
        step.num_scheduled_tokens = {request.req_id: num_tokens for request in requests}
        step.total_num_scheduled_tokens = num_tokens * len(requests)
        setattr(step, ATTRIBUTE, message)
        runner = self._runner
        runner.execute_model(step)
        states, req_ids = runner.last_forward()
        hidden = states[: num_tokens * len(requests)].float().clone()
        # vLLM may have sorted the batch; all requests have equally many tokens.
        order = [req_ids.index(request.req_id) for request in requests]
        runner.sample_tokens(None)
        return hidden.view(len(requests), num_tokens, -1)[order].flatten(0, 1)

    def _finish(self, requests: list[_Request]) -> None:
        step = SchedulerOutput.make_empty()
        step.finished_req_ids = {request.req_id for request in requests}
        self._runner.execute_model(step)
        used = [block for request in requests for block in (*request.blocks, *request.spare)]
        slots = np.array(used)[:, None] * self._block + np.arange(self._block)
        where = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self._pool.device)
        for layer in self._pool.layers:
            layer.scatter(where, torch.zeros_like(layer.gather(where)))
