"""How many engine steps the blocks of an aborted request stay taken, counted at vLLM's pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Pending:
    step: int
    blocks: set[int]


class Releases:
    """Watches every block that goes back to the pool of an arm; counts its own steps.

    Attributes:
        steps: for each abort, steps begun from its arrival until the last block was free.
    """

    def __init__(self, arm: Any) -> None:
        self._layer = arm.layer
        self._pool = arm.scheduler.kv_cache_manager.block_pool
        self._step = 0
        self._pending: list[_Pending] = []
        self.steps: list[int] = []
        self._free = self._pool.free_blocks
        self._pool.free_blocks = self._freeing

    def step_begins(self) -> None:
        """Call before every engine step."""
        self._step += 1

    def abort_arrives(self, request: str) -> None:
        """Expect all that the request alone holds, destinations of its copies included."""
        tracked = self._layer.requests.items()
        held: set[int] = set()
        for kv in (kv for req_id, kv in tracked if req_id.split("-")[0] == request):
            held |= {b for b in kv.blocks.ids.tolist() if self._pool.blocks[b].ref_cnt == 1}
            held |= set(kv.plan.dst_blocks.tolist()) if kv.plan else set()
        if held:  # a request that waits has nothing
            self._pending.append(_Pending(self._step, held))

    def end(self) -> list[int]:
        """Stop watching.

        Raises:
            AssertionError: an abort has left blocks taken.
        """
        self._pool.free_blocks = self._free
        assert not self._pending, self._pending
        return self.steps

    def _freeing(self, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        listed = list(blocks)
        self._free(listed, *args, **kwargs)
        for pending in self._pending:
            pending.blocks -= {block.block_id for block in listed}
        self.steps += [self._step - one.step for one in self._pending if not one.blocks]
        self._pending = [one for one in self._pending if one.blocks]
