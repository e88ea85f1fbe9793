"""``GET /admin/blocks``: the pool block by block, for the page at ``/vtoken/ui``.

Drawing it up takes the engine's time between two steps (0.5 µs a block), so however many people
look and however often they ask, the engine is asked so rarely that maps take at most
:data:`MAX_ENGINE_RATIO` of its time; in between everybody gets the last map.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse

from service.admin_body import check_query
from service.auth import require_admin
from service.engine_link import EngineLink
from service.errors import RejectedError

MAX_CELLS = 4096
"""A larger pool is summed up: a screen shows no more, and 4096 cells are some 60 KiB."""
MAX_ENGINE_RATIO = 0.005
MIN_INTERVAL_SECONDS = 0.5

router = APIRouter(prefix="/admin", tags=["vToken"], dependencies=[Depends(require_admin)])


class BlockMaps:
    """Asks the engine for a map, but not too often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: dict[str, Any] | None = None
        self._read_at = 0.0

    async def get(self, link: EngineLink, engine: int = 0) -> dict[str, Any]:
        """One engine's map, with ``age_seconds`` and the ``interval_seconds`` of its renewal.

        Raises:
            RejectedError: there is no such engine.
            AdminError: the engines cannot be asked; an old map is no answer to that.
        """
        async with self._lock:
            if self._last is None or self._clock() - self._read_at >= self._interval:
                self._last = None  # if this fails, the next caller tries again
                self._last = await link.blocks(MAX_CELLS)
                self._read_at = self._clock()
            age = self._clock() - self._read_at
            maps = self._last.get("engines", [self._last])
            if engine >= len(maps):
                raise _no_engine(str(engine), len(maps))
            return {
                **maps[engine],
                "engine": engine,
                "num_engines": len(maps),
                "policy_version": self._last["policy_version"],
                "age_seconds": age,
                "interval_seconds": self._interval,
            }

    @property
    def _interval(self) -> float:
        assert self._last is not None
        return max(MIN_INTERVAL_SECONDS, float(self._last["seconds"]) / MAX_ENGINE_RATIO)


def attach(app: FastAPI) -> None:
    """Add the route to ``app``; mutates it."""
    app.state.vtoken_blocks = BlockMaps()
    app.include_router(router)


def _link(request: Request) -> EngineLink:
    return cast(EngineLink, request.app.state.vtoken.link)


def _maps(request: Request) -> BlockMaps:
    return cast(BlockMaps, request.app.state.vtoken_blocks)


def _no_engine(value: str, num_engines: int) -> RejectedError:
    bound = f"a whole number with 0 <= engine < {num_engines}"
    message = f"engine={value[:20]} is not allowed: {bound}"
    return RejectedError(message, field="engine", value=value[:20], bound=bound)


def _engine(
    request: Request,
    engine: Annotated[
        str,
        Query(
            description="Whose blocks, under data parallelism.",
            json_schema_extra={"type": "integer", "minimum": 0},
        ),
    ] = "0",
) -> int:
    check_query(request.query_params.multi_items(), ("engine",))
    if not re.fullmatch("[0-9]{1,6}", engine):
        raise _no_engine(repr(engine), 10**6)
    return int(engine)


@router.get("/blocks")
async def get_blocks(
    link: Annotated[EngineLink, Depends(_link)],
    maps: Annotated[BlockMaps, Depends(_maps)],
    engine: Annotated[int, Depends(_engine)],
) -> JSONResponse:
    """Blocks held, shared, moving and cached, and live tokens, per cell of neighbouring blocks."""
    return JSONResponse(await maps.get(link, engine))
