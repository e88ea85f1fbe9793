"""The relocation kernel: one launch moves a batch of tokens in all layers of a family.

Imported only where Triton is: see :func:`vtoken.copy_engine.cuda.choose_mover`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vtoken.kv_pages import LayerFamily

_TILE_WORDS = 4096
"""Most words that a program holds in registers at once."""


@triton.jit
def _copy_tokens(  # type: ignore[no-untyped-def]  # parameters are Triton's: pointers and numbers
    addresses,  # [L] int64, where each layer begins
    src,  # [n] int64 slots
    dst,  # [n] int64 slots; no slot is in both
    block_stride,  # strides in words
    run_stride,
    token_stride,
    PAGE: tl.constexpr,  # tokens per block
    RUNS: tl.constexpr,  # runs of a token
    WORDS: tl.constexpr,  # words of a run
    TILE_RUNS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Program (i, l) copies token i in layer l, tile by tile."""
    source = tl.load(src + tl.program_id(0))
    target = tl.load(dst + tl.program_id(0))
    base = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    # int64 from here on: a cache has more than 2**31 words.
    source = (source // PAGE) * block_stride + (source % PAGE) * token_stride
    target = (target // PAGE) * block_stride + (target % PAGE) * token_stride
    for first_run in range(0, RUNS, TILE_RUNS):
        run = first_run + tl.arange(0, TILE_RUNS)[:, None]
        for first_word in range(0, WORDS, TILE_WORDS):
            word = first_word + tl.arange(0, TILE_WORDS)[None, :]
            inside = (run < RUNS) & (word < WORDS)
            place = run.to(tl.int64) * run_stride + word
            words = tl.load(base + source + place, mask=inside)
            tl.store(base + target + place, words, mask=inside)


def move_by_kernel(family: LayerFamily, src: torch.Tensor, dst: torch.Tensor) -> None:
    """The mover on CUDA; see :data:`vtoken.paged_pool.Mover`. Queues one launch."""
    words = family.words
    page, num_runs, num_words = words.shape[2], words.shape[1], words.shape[3]
    block_stride, run_stride, token_stride, _ = words.stride()
    if run_stride == num_words or num_runs == 1:  # the runs of a token follow each other
        num_runs, num_words = 1, num_runs * num_words
    tile_words = min(triton.next_power_of_2(num_words), _TILE_WORDS)
    tile_runs = min(triton.next_power_of_2(num_runs), max(1, _TILE_WORDS // tile_words))
    _copy_tokens[(len(src), len(family.layers))](
        family.addresses,
        src,
        dst,
        block_stride,
        run_stride,
        token_stride,
        PAGE=page,
        RUNS=num_runs,
        WORDS=num_words,
        TILE_RUNS=tile_runs,
        TILE_WORDS=tile_words,
    )
