"""What else saves KV memory: a cap of blocks per request, and keys and values in eight bits."""

from __future__ import annotations

import math
from dataclasses import replace

from loadtest.bench import Bench
from loadtest.fleet import BLOCK_SIZE, Arm, Engine
from loadtest.server import StartError

CAP_FIELD = "max_blocks_per_request"
FP8 = "native, fp8"
FP8_BYTES_RATIO = 0.5
"""Bytes of a token in an fp8 cache over those in the bf16 cache of the other arms."""


async def make_fp8_arm(bench: Bench, engine: Engine) -> Arm | None:
    """Stock vLLM with an fp8 cache: as many bytes as ``engine`` has, so more blocks.

    Returns:
        None, and says so in the notes, if vLLM does not start with one here: on CPUs it needs
        AVX-512 or AMX.
    """
    num_blocks = round(engine.num_blocks / FP8_BYTES_RATIO)
    flags = {**engine.flags, "kv-cache-dtype": "fp8"}
    arm = Arm(FP8, "off", {}, replace(engine, num_blocks=num_blocks, flags=flags))
    try:
        await bench.fleet.client(arm)
    except StartError as error:
        bench.notes.append(f"vLLM does not start with an fp8 cache here, it is left out: {error}")
        return None
    return arm


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
    client = await bench.fleet.service(model)
    if CAP_FIELD not in await client.policy():
        bench.notes.append("No cap of blocks per request in this service: zipage is left out.")
        return
    cap = math.ceil((budget_tokens + buffer_tokens) / BLOCK_SIZE)
    arms["zipage"] = Arm("zipage", "lazy", {**model.policy, CAP_FIELD: cap}, model.engine)
