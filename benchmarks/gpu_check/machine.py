"""The device under test: how long its work takes, and sizes to measure with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sizes:
    """Shapes of what is checked and measured.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_size: of the model.
        num_blocks: of 16 tokens, in the pool.
        move_counts: tokens per relocation batch.
        num_reqs, num_live: decode batch.
        repeats: measurements; the median counts.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_blocks: int
    move_counts: tuple[int, ...]
    num_reqs: int
    num_live: int
    repeats: int

    @property
    def num_slots(self) -> int:
        """Tokens in the pool."""
        return 16 * self.num_blocks


LLAMA_8B = Sizes(32, 32, 8, 128, 9600, (64, 512, 4096), 32, 4096, 20)
"""Llama-3.1-8B in bf16: 128 KiB per token, 19 GiB of pool; fits a GPU of 24 GiB beside nothing."""
SMALL = Sizes(2, 4, 2, 64, 24, (8,), 2, 40, 1)
"""For tests on a CPU."""


@dataclass(frozen=True)
class Machine:
    """A device and how its work is timed.

    Attributes:
        device: under test.
        sizes: see :class:`Sizes`.
        seconds: times one call of a function, its device work included.
    """

    device: torch.device
    sizes: Sizes
    seconds: Callable[[Callable[[], object]], float]

    def median_seconds(self, work: Callable[[], object]) -> float:
        """Median over ``sizes.repeats`` calls, after two that are not counted."""
        for _ in range(2):
            work()
        return float(np.median([self.seconds(work) for _ in range(self.sizes.repeats)]))


def cuda_seconds(work: Callable[[], object]) -> float:
    """Device time between two events around ``work``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
