"""Everything the token layer knows about one running request, and its invariants' subject."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtoken.occupancy import RequestBlocks
from vtoken.token_table import TokenTable
from vtoken.types import RelocationMoves


@dataclass(eq=False)
class RelocationPlan:
    """One reserved relocation: destinations are taken, nothing is committed (DESIGN §2).

    Attributes:
        req_id: whose tokens move.
        source_indices: ``[k]`` places of the sources in the request's block list, ascending.
        dst_blocks: ``[d]`` blocks taken from the pool, ``d < k``.
        moves: token by token.
        ticket: batch it was sent with.
        orphaned: its request ended first; only the destinations remain to be freed.
    """

    req_id: str
    source_indices: NDArray[np.int64]
    dst_blocks: NDArray[np.int32]
    moves: RelocationMoves
    ticket: int = 0
    orphaned: bool = False


@dataclass(eq=False)
class RequestKV:
    """Table, block occupancy and eviction schedule of one request.

    Attributes:
        req_id: vLLM's internal id.
        table, blocks: logical and physical view of the same tokens.
        num_prompt_tokens: length of the prompt.
        request_seed: derived from the prompt, for reproducible random policies.
        prefill_end: logical length from which eviction may start.
        next_evict_at: logical length at which the next eviction is due.
        num_evicted: tokens evicted so far.
        plan: relocation in flight, at most one (I4).
        row_stale: the worker's row must be rebuilt before the next forward.
    """

    req_id: str
    table: TokenTable
    blocks: RequestBlocks
    num_prompt_tokens: int
    request_seed: int
    prefill_end: int
    next_evict_at: int
    num_evicted: int = 0
    plan: RelocationPlan | None = None
    row_stale: bool = field(default=True)

    @property
    def ideal_blocks(self) -> int:
        """⌈live / S⌉: blocks it would hold if live tokens were packed."""
        return -(-self.table.num_live // self.table.block_size)
