"""Proofs that a device does what the token layer relies on; seconds, on the cache itself.

An engine on a GPU runs them at start, before it serves, since the kernels were written and tested
without one; ``scripts/gpu_check`` runs them too. Nothing here knows vLLM. Contents of the slots
that are used are lost: they are zero afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.copy_engine.base import CopyEngine
from vtoken.errors import UnsupportedError
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool
from vtoken.types import SlotArray

NOT_A_NUMBER = {
    torch.bfloat16: 0x7FC07FC0,
    torch.float16: 0x7E007E00,
    torch.float32: 0x7FC00000,
    torch.float8_e4m3fn: 0x7F7F7F7F,
}
"""A word of a cache that is NaN in each of its numbers."""


@dataclass(frozen=True)
class Finding:
    """What a proof measured.

    Attributes:
        name: of what was compared.
        value: how far it is off.
        limit: the most that passes.
        note: in words, where a number does not say it.
    """

    name: str
    value: float
    limit: float = 0.0
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the proof holds; NaN never does."""
        return self.value <= self.limit

    def __str__(self) -> str:
        """``what: value (limit …)``."""
        note = f", {self.note}" if self.note else ""
        return f"{self.name}: {self.value:.4g} (limit {self.limit:.4g}{note})"


def refuse_failed(findings: Sequence[Finding]) -> None:
    """Pass if every proof holds.

    Raises:
        UnsupportedError: names those that failed, with their numbers.
    """
    failed = [finding for finding in findings if not finding.ok]
    if failed:
        raise UnsupportedError(
            f"this device failed {len(failed)} of {len(findings)} checks of vToken at start: "
            + "; ".join(map(str, failed))
            + ". Use --vtoken-mode off."
        )


@dataclass(frozen=True, eq=False)
class _Slots:
    """Distinct slots: sources, their destinations, and neighbours that nobody may touch."""

    src: SlotArray
    dst: SlotArray
    bystanders: SlotArray

    @classmethod
    def choose(cls, num_slots: int, count: int) -> _Slots:
        """All over the pool, its ends included; the same ones each time."""
        count, generator = min(count, num_slots // 4), np.random.default_rng(0)
        inner = 1 + generator.choice(num_slots - 2, 2 * count - 2, replace=False)
        order = generator.permutation([0, *inner, num_slots - 1])
        src, dst = order[:count], order[count:]
        near = np.concatenate([dst - 1, dst + 1, src - 1, src + 1])
        near = np.setdiff1d(near[(near >= 0) & (near < num_slots)], order)
        return cls(*(part.astype(np.int32) for part in (src, dst, near)))


def check_copies(pool: PagedPool, engine: CopyEngine, count: int) -> Iterator[Finding]:
    """A batch through the copy engine against what torch read from the sources before.

    Args:
        pool: of the engine; every layer is looked at.
        engine: over ``pool``, nothing outstanding.
        count: tokens to move, fewer in a small pool.
    """
    slots = _Slots.choose(pool.num_slots, count)
    parts = [_on(pool, part) for part in (slots.src, slots.dst, slots.bystanders)]
    src, dst, bystanders = parts
    before = []
    for layer in pool.layers:
        for part in parts:
            layer.scatter(part, _random_words(layer, part))
        before.append((layer.gather(src), layer.gather(bystanders)))
    engine.submit(1, slots.src, slots.dst)
    engine.wait_before_read()
    moved, stayed = (torch.zeros((), dtype=torch.int64, device=pool.device) for _ in range(2))
    for layer, (expected, untouched) in zip(pool.layers, before, strict=True):
        moved += (layer.gather(dst) != expected).sum()
        stayed += (layer.gather(src) != expected).sum()
        stayed += (layer.gather(bystanders) != untouched).sum()
    errors = [result.error for result in engine.poll() if result.error]
    of = f"of {sum(expected.numel() for expected, _ in before)} words"
    yield Finding("words that the relocation kernel got wrong", float(moved), note=of)
    yield Finding("words that it must not touch and did", float(stayed), note=of)
    yield Finding("batches refused", float(len(errors)), note="; ".join(errors))
    for layer in pool.layers:
        for part in parts:
            layer.scatter(part, torch.zeros_like(layer.gather(part)))


def check_order(pool: PagedPool, engine: CopyEngine, rounds: int, count: int) -> Finding:
    """Sources written right before, destinations read right after: every round must agree.

    A copy that ran before the write, or a read that ran before the copy, would find the number of
    an earlier round. Nothing waits for the device in between.
    """
    half = min(count, pool.num_slots // 2)
    dst, src = (np.arange(start, start + half, dtype=np.int32) for start in (0, half))
    written, read = _on(pool, src), _on(pool, dst)
    wrong = torch.zeros((), dtype=torch.int64, device=pool.device)
    for number in range(1, rounds + 1):
        for layer in pool.layers:  # the forward that writes K and V
            layer.scatter(written, torch.full_like(layer.gather(written), number))
        engine.submit(number, src, dst)
        engine.wait_before_read()
        for layer in pool.layers:
            wrong += (layer.gather(read) != number).any()
    engine.poll()
    for layer in pool.layers:
        for part in (written, read):
            layer.scatter(part, torch.zeros_like(layer.gather(part)))
    return Finding("reads that overtook a copy", float(wrong), note=f"{rounds} rounds")


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, soft_cap: float = 0.0
) -> torch.Tensor:
    """The last queries of one request over all its live tokens, in float32.

    Args:
        query: ``[num_queries, num_heads, head_size]``, of the newest tokens.
        key, value: ``[num_live, num_kv_heads, head_size]``, logical order.
        scale: factor on the logits.
        soft_cap: see :func:`vtoken.scores.attention_mass`.

    Returns:
        ``[num_queries, num_heads, head_size]``.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (part.float().repeat_interleave(group, 1) for part in (key, value))
    logits = torch.einsum("qhd,lhd->qhl", query.float(), key) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    num_queries, num_live = len(query), len(key)
    place = torch.arange(num_live, device=query.device)
    newest = torch.arange(num_live - num_queries, num_live, device=query.device)
    later = place[None, :] > newest[:, None]
    weights = logits.masked_fill(later[:, None], -torch.inf).softmax(-1)
    return torch.einsum("qhl,lhd->qhd", weights, value)


def poison(layer: PagedKV, slots: torch.Tensor | None = None) -> None:
    """Make ``slots`` of a layer NaN, all of them by default: whoever reads one gives itself away.

    Raises:
        UnsupportedError: the cache holds numbers of a kind that is not known here.
    """
    word = NOT_A_NUMBER.get(layer.cache.dtype)
    if word is None:
        raise UnsupportedError(f"a KV cache of {layer.cache.dtype} cannot be checked")
    if slots is None:
        layer.words.fill_(word)
    else:
        layer.scatter(slots, torch.full_like(layer.gather(slots), word))


def _on(pool: PagedPool, slots: SlotArray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(pool.device)


def _random_words(layer: PagedKV, slots: torch.Tensor) -> torch.Tensor:
    held = layer.gather(slots)
    return torch.randint_like(held, -(2**31), 2**31 - 1)
