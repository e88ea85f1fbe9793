"""The pool at a glance: how full each block is, who shares it, what is being moved.

For people (``GET /admin/blocks``), not for decisions. A pool larger than ``max_cells`` is summed up
in cells of neighbouring blocks, so that the answer stays small however large the pool is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.occupancy import GIVEN_BACK
from vtoken.request_kv import RequestKV

CACHED = -1
"""In ``references``: nobody holds the block, but the prefix cache still finds its content."""

_Counts = NDArray[np.int64]


def block_map(
    requests: Iterable[RequestKV],
    references: NDArray[np.int32],
    destinations: NDArray[np.int32],
    block_size: int,
    max_cells: int,
) -> dict[str, Any]:
    """Count blocks per cell.

    Args:
        requests: everybody who holds blocks.
        references: ``[num_blocks + 1]`` holders of each block, or :data:`CACHED`; entry 0 is the
            null block and is left out.
        destinations: ids of the blocks that relocations in flight copy into.
        block_size: slots per block (S).
        max_cells: the answer has at most so many cells.

    Returns:
        ``num_blocks``, ``block_size``, ``blocks_per_cell``, and lists with one count per cell, in
        order of block ids: ``held`` blocks, their ``live`` tokens, blocks that are ``shared``,
        ``moving`` (source or destination of a relocation in flight) and ``cached``. Of a shared
        block the holder with most live tokens counts. Mean utilisation of a cell is
        ``live / (held * block_size)``.
    """
    num_blocks = len(references) - 1
    live = np.zeros(num_blocks + 1, np.int64)
    moving = np.zeros(num_blocks + 1, np.bool_)
    moving[destinations] = True
    for kv in requests:
        blocks = kv.blocks
        here = blocks.ids != GIVEN_BACK
        ids = blocks.ids[here]
        live[ids] = np.maximum(live[ids], blocks.num_live[here])
        if kv.plan is not None:
            moving[blocks.ids[kv.plan.source_indices]] = True
    per_cell = max(1, -(-num_blocks // max_cells))
    counts = {
        "held": references > 0,
        "live": live,
        "shared": references > 1,
        "moving": moving,
        "cached": references == CACHED,
    }
    cells = {name: _per_cell(values[1:], per_cell).tolist() for name, values in counts.items()}
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "blocks_per_cell": per_cell,
        **cells,
    }


def _per_cell(values: NDArray[Any], per_cell: int) -> _Counts:
    """Sums of ``per_cell`` neighbours; the last cell may have fewer."""
    starts = np.arange(0, len(values), per_cell)
    sums: _Counts = np.add.reduceat(values.astype(np.int64), starts)
    return sums
