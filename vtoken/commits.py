"""A plan takes effect: table, block list and pool follow its copies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import VTokenStats


class Commits:
    """Commits plans, and counts what they free."""

    def __init__(self, pool: BlockPoolPort, stats: VTokenStats) -> None:
        self._pool = pool
        self._stats = stats
        self._net_freed = 0

    def commit(self, kv: RequestKV, plan: RelocationPlan) -> None:
        """Tokens are at their destinations from now on, sources go back to the pool, and the
        worker gets the row anew. Tokens that died since the plan was made leave room there."""
        moves = plan.moves
        alive = kv.table.is_live(moves.token_ids)  # some may have been evicted meanwhile
        dst_slots = moves.dst_slots[alive]
        kv.table.apply_moves(moves.token_ids[alive], moves.src_slots[alive], dst_slots)
        sources = kv.blocks.ids[plan.source_indices].copy()
        size = kv.table.block_size
        filled = np.arange(moves.num_moves) // size  # destination of each move, before losses
        dst_live = np.bincount(filled[alive], minlength=len(plan.dst_blocks)).astype(np.int32)
        kv.blocks.relocate(plan.source_indices, plan.dst_blocks, dst_live)
        self._pool.replace(
            kv.req_id, plan.source_indices.tolist(), _padded(plan.dst_blocks, len(sources))
        )
        self._count_freed(int((~self._pool.shared(sources)).sum()) - len(plan.dst_blocks))
        self._pool.free(sources[::-1].tolist())
        kv.send_row()
        self._stats.inc("relocations_total", 1, "committed")
        self._stats.inc("relocated_tokens_total", len(dst_slots))

    def _count_freed(self, num_blocks: int) -> None:
        """Net gain of one plan. Of a group that lets go of shared blocks only the last one gains:
        what the others spent on destinations is set against it, so that the counter only grows.
        """
        self._net_freed += num_blocks
        if self._net_freed > 0:
            self._stats.inc("freed_blocks_total", self._net_freed, "relocation")
            self._net_freed = 0

    def free_emptied(self, kv: RequestKV, plan: RelocationPlan) -> None:
        """Give back the plan's places that evictions emptied while it held them."""
        places = plan.source_indices
        empty = places[(kv.blocks.num_live[places] == 0) & (kv.blocks.ids[places] != 0)]
        if not len(empty):
            return
        kv.give_back(empty, self._pool)
        self._stats.inc("freed_blocks_total", len(empty), "empty")


def _padded(dst_blocks: NDArray[np.int32], length: int) -> list[int]:
    """Destination ids followed by the null block for places that are given back."""
    ids: list[int] = dst_blocks.tolist()
    return ids + [0] * (length - len(ids))
