"""Plain data shared by planner, reclamation, copy engine and the vLLM integration.

Words: a *logical token id* is the index of a token in its request and never
changes. A *slot* is ``block_id * block_size + offset``: one token's place in the pool.
Everything here is frozen; arrays inside are owned by the receiver and never written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IdArray: TypeAlias = NDArray[np.int64]
"""Logical token ids, ascending unless stated otherwise."""
SlotArray: TypeAlias = NDArray[np.int32]
"""Slots, ``block_id * block_size + offset``."""
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RelocationMoves:
    """The moves of one plan (paper §3.3, stage 3), as parallel arrays of shape ``[num_moves]``.

    ``token_ids`` ascends, so destinations are filled in logical order. The tuple
    ``(token_id, src_block, src_offset, dst_block, dst_offset)`` of the paper is row ``i`` of
    ``token_ids, src_slots, dst_slots`` after division by the block size.
    """

    token_ids: IdArray
    src_slots: SlotArray
    dst_slots: SlotArray

    @property
    def num_moves(self) -> int:
        """Number of tokens that change place."""
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class CopyResult:
    """What the copy engine says about one ticket, once.

    Attributes:
        ticket: the number that ``submit`` gave out.
        error: ``None`` if every byte was copied, otherwise the reason in one line.
        copy_seconds: time the copies themselves took.
        stall_seconds: time the next forward had to wait for them (0 if already done).
        num_bytes: bytes written.
    """

    ticket: int
    error: str | None
    copy_seconds: float
    stall_seconds: float
    num_bytes: int
