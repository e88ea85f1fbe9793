"""A cap on the blocks of each request (``max_blocks_per_request``), after Zipage (arXiv
2603.08743): a request that has filled its blocks is cut down to its budget, and what is left is
packed at once. It replaces the eviction interval, θ_F and the watermark; which tokens die is the
policy's business as ever.

Pure functions. They count blocks as if live tokens below the open block were packed, so modes
``naive`` and ``lazy`` are due at the same length and take the same decisions.
"""

from __future__ import annotations


def capped_target(target: int, max_blocks: int, block_size: int) -> int:
    """Live tokens that a request may keep: one block of the cap is left to grow into."""
    return min(target, (max_blocks - 1) * block_size)


def full_at(num_computed: int, num_live_closed: int, max_blocks: int, block_size: int) -> int:
    """Logical length at which the request will have filled its blocks.

    Args:
        num_computed: present length, after an eviction.
        num_live_closed: live tokens outside of the block that is being written.
        max_blocks: the cap.
        block_size: slots per block (S).

    Returns:
        A multiple of the block size above ``num_computed``: where ``max_blocks`` are full, or, for
        a request that cannot be brought below the cap, the end of the block being written.
    """
    filled = -(-num_live_closed // block_size)
    return (num_computed // block_size + max(1, max_blocks - filled)) * block_size
