"""Rivals that not every service has: looked for when the scenario runs."""

from __future__ import annotations

import math

from loadtest.bench import Bench
from loadtest.fleet import BLOCK_SIZE, Arm

CAP_FIELD = "max_blocks_per_request"


async def add_zipage(
    bench: Bench,
    arms: dict[str, Arm],
    like: str,
    budget_tokens: int,
    buffer_tokens: int = BLOCK_SIZE,
) -> None:
    """Add the arm ``zipage``, a cap of blocks per request, if the service has one.

    Args:
        bench: whose service is asked.
        arms: to add to; mutated.
        like: name of the arm whose policy and engine it takes.
        budget_tokens: live tokens that a request may keep.
        buffer_tokens: by how many it may grow before it is cut again: the cap is both together.
    """
    model = arms[like]
    client = await bench.fleet.client(model)
    if CAP_FIELD not in await client.policy():
        bench.notes.append("No cap of blocks per request in this service: zipage is left out.")
        return
    cap = math.ceil((budget_tokens + buffer_tokens) / BLOCK_SIZE)
    arms["zipage"] = Arm("zipage", "lazy", {**model.policy, CAP_FIELD: cap}, model.engine)
