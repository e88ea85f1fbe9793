"""A plan takes effect: table, block list and pool follow its copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vtoken.ports import BlockPoolPort
from vtoken.request_kv import RelocationPlan, RequestKV
from vtoken.stats import VTokenStats


@dataclass(frozen=True)
class Settled:
    """What a report led to.

    Attributes:
        committed: requests whose plan stands.
        lost: requests whose plan was committed before its copy failed: their K/V is gone and
            they must end with an error. Empty unless a copy fails under memory pressure.
    """

    committed: list[RequestKV]
    lost: list[RequestKV]


class Commits:
    """Commits plans, and counts them and what they free."""

    def __init__(self, pool: BlockPoolPort, stats: VTokenStats) -> None:
        self._pool = pool
        self._stats = stats
        self._net_freed = 0
        self._unproven: dict[int, list[tuple[RequestKV, int]]] = {}

    @property
    def unproven(self) -> Set[int]:
        """Tickets of plans that were committed before their copy was reported."""
        return self._unproven.keys()

    def commit(self, kv: RequestKV, plan: RelocationPlan) -> None:
        """The plan takes effect; its copy is complete."""
        self._count_committed(self._apply(kv, plan))

    def commit_early(self, kv: RequestKV, plan: RelocationPlan) -> None:
        """The plan takes effect; what came of its copy, and with it the outcome, is known later."""
        moved = (kv, self._apply(kv, plan))
        self._unproven.setdefault(plan.ticket, []).append(moved)

    def prove(
        self,
        ticket: int,
        error: str | None,
        requests: Mapping[str, RequestKV],
        damaged: Collection[str],
    ) -> Settled:
        """The copies of a batch are reported: what becomes of those committed early, if any.

        The arguments are those of :meth:`~vtoken.reclamation.ReclamationManager.settle`.
        """
        settled = Settled([], [])
        for kv, num_tokens in self._unproven.pop(ticket, []):
            if error is None and kv.req_id not in damaged:
                self._count_committed(num_tokens)
                settled.committed.append(kv)
                continue
            self._stats.inc("relocations_total", 1, "failed")
            # A preempted request is computed again and needs nothing of its old blocks.
            if requests.get(kv.req_id) is kv:
                settled.lost.append(kv)
        return settled

    def _apply(self, kv: RequestKV, plan: RelocationPlan) -> int:
        """Tokens are at their destinations from now on, sources go back to the pool, and the
        worker gets the row anew. Tokens that died since the plan was made leave room there.

        Returns:
            How many tokens moved.
        """
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
        return len(dst_slots)

    def _count_committed(self, num_tokens: int) -> None:
        self._stats.inc("relocations_total", 1, "committed")
        self._stats.inc("relocated_tokens_total", num_tokens)

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
