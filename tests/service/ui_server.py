"""The page with its routes on a real HTTP port, over a real token layer and no model."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import uvicorn

from service import blocks, ui
from tests.core_models import ModelPool, kill, make_layer, make_request
from tests.service.conftest import Door, FakeEngine
from vtoken.block_map import CACHED, block_map
from vtoken.token_layer import TokenLayer

NUM_BLOCKS, BLOCK_SIZE = 200, 16


class PoolEngine(FakeEngine):
    """Policy and statistics as the fake engine's; pool, requests and blocks of a token layer."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.pool = ModelPool(num_blocks, BLOCK_SIZE)
        self.layer: TokenLayer = make_layer(self.pool, policy="none")[0]

    def _answer(self, op: str, payload: Any) -> dict[str, Any]:
        if op == "blocks":
            return {"ok": self.blocks(payload["max_cells"])}
        if op == "state":
            return {"ok": self.state()}
        return super()._answer(op, payload)

    def blocks(self, max_cells: int) -> dict[str, Any]:
        """As the engine's operation of this name."""
        references = np.array(self.pool.ref, np.int32)
        free = [b for b in self.pool.hash_of_block if not self.pool.ref[b]]
        references[free] = CACHED
        destinations = self.layer.reclamation.destinations_in_flight()
        cells = block_map(
            self.layer.requests.values(), references, destinations, BLOCK_SIZE, max_cells
        )
        return {**cells, "policy_version": self.version, "seconds": 0.001}

    def state(self) -> dict[str, Any]:
        """As the engine's operation of this name."""
        requests = [
            {
                "request_id": kv.req_id,
                "status": "running",
                "policy": "random",
                "num_tokens": kv.num_tokens,
                "live_tokens": kv.num_live,
                "evicted_tokens": kv.num_evicted,
                "retained_blocks": kv.blocks.retained,
                "ideal_blocks": kv.ideal_blocks,
            }
            for kv in self.layer.requests.values()
        ]
        counts = {"running": len(requests), "waiting": 0, "steps": 1}
        return {"pool": self.layer.pool_state(), "requests": requests, "engine": counts}

    def fill(self) -> None:
        """Three requests: whole and shared, half evicted, nearly empty and being repacked."""
        make_request(self.layer, self.pool, "whole", num_tokens=400)
        self.pool.cache_full_blocks("whole", [f"h{i}" for i in range(4)])
        half = make_request(
            self.layer, self.pool, "half", num_tokens=600, hashes=[f"h{i}" for i in range(4)]
        )
        kill(self.layer, half, [t for t in range(64, 600) if t % 2])
        sparse = make_request(self.layer, self.pool, "sparse", num_tokens=500)
        kill(self.layer, sparse, [t for t in range(499) if t % 16])
        self.layer.plan_relocations([(sparse, 499)])
        make_request(self.layer, self.pool, "done", num_tokens=64)
        self.pool.cache_full_blocks("done", ["d0", "d1"])
        self.layer.forget("done")
        self.pool.release("done")


class UiServer:
    """A thread with an HTTP server; ``stop`` and ``start`` again keep the address."""

    def __init__(self, engine: FakeEngine, **door: Any) -> None:
        self.door = Door(engine, **door)
        self.app = self.door.app
        blocks.attach(self.app)
        ui.attach(self.app)
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/vtoken/ui"

    def start(self) -> None:
        """Listen, on the same port as before."""
        self.app.state.vtoken_blocks = blocks.BlockMaps()  # its lock belongs to a loop
        config = uvicorn.Config(self.app, port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.02)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Close everything."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=30)
