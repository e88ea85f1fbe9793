"""How many API processes stand before an engine: two fields that vLLM sets on its arguments."""

from __future__ import annotations

from typing import Any

SUPERVISOR = -1
"""The rank of the process that starts engines and API processes, and serves nobody."""


def set_api_process(engine_args: Any, count: int, rank: int) -> None:
    """Say which of ``count`` API processes this is, from 0; mutates ``engine_args``."""
    engine_args._api_process_count = count
    engine_args._api_process_rank = rank
