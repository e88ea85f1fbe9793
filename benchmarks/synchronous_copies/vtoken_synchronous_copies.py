"""A plugin of vLLM for one arm of the overhead benchmark, synchronous copies, and nothing else.

With this folder on ``PYTHONPATH`` every process of a service loads it (the folder beside this file
makes it look installed): the step then waits for each batch of copies where it is submitted,
instead of letting it overlap with what comes before the next forward. Not part of the product.
"""

from __future__ import annotations

from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.types import SlotArray

_start = CpuCopyEngine._start


def start_and_wait(
    engine: CpuCopyEngine, ticket: int, src_slots: SlotArray, dst_slots: SlotArray
) -> None:
    """What replaces the start of a batch; the wait counts as a stall, as any other does."""
    _start(engine, ticket, src_slots, dst_slots)
    engine.wait_before_read()


def register() -> None:
    """Make all copies of this process synchronous."""
    CpuCopyEngine._start = start_and_wait
