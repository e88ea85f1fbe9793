"""The page with its routes on a real HTTP port, over a real token layer and no model."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from service import blocks, health, ui
from service.engines import AllEngines
from service.metrics import VTokenCollector, register
from tests.core_models import ModelPool, kill, make_layer, make_request
from tests.service.conftest import Door, FakeEngine
from vtoken.integration.vllm.engine_core import vtoken_call
from vtoken.integration.vllm.scheduler import VTokenSchedulerMixin
from vtoken.token_layer import TokenLayer

NUM_BLOCKS, BLOCK_SIZE = 200, 16


class PoolScheduler(VTokenSchedulerMixin):
    """What the engine's operations look at: a real token layer over a model of vLLM's pool."""

    def __init__(self, pool: ModelPool, layer: TokenLayer) -> None:
        self.layer, self.pool = layer, pool
        self.recent_relocations = deque()
        self.num_steps = 1

    @property
    def requests(self) -> dict[str, Any]:
        """As vLLM's requests, as far as somebody looks."""
        status = SimpleNamespace(name="RUNNING")
        return {
            kv.req_id: SimpleNamespace(
                status=status,
                num_tokens=kv.num_tokens,
                num_computed_tokens=kv.num_tokens,
                sampling_params=None,
            )
            for kv in self.layer.requests.values()
        }

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting."""
        return len(self.layer.requests), 0

    @property
    def kv_cache_manager(self) -> Any:
        """vLLM's pool, made anew from the model at each look."""
        blocks = [
            SimpleNamespace(block_id=i, ref_cnt=n, block_hash=self.pool.hash_of_block.get(i))
            for i, n in enumerate(self.pool.ref)
        ]
        pool = SimpleNamespace(blocks=blocks, num_gpu_blocks=len(blocks), enable_caching=True)
        groups = [SimpleNamespace(block_size=self.pool.block_size)]
        coordinator = SimpleNamespace(single_type_managers=groups)
        return SimpleNamespace(block_pool=pool, coordinator=coordinator)


class PoolEngine(FakeEngine):
    """Answers with the engine's own operations, over :class:`PoolScheduler`."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.pool = ModelPool(num_blocks, BLOCK_SIZE)
        self.layer: TokenLayer = make_layer(self.pool, policy="none", budget_tokens=1024)[0]
        self._core = SimpleNamespace(scheduler=PoolScheduler(self.pool, self.layer))

    def _answer(self, op: str, payload: Any) -> dict[str, Any]:
        reply: dict[str, Any] = vtoken_call(self._core, op, payload)
        return reply

    def ask(self, op: str, **payload: Any) -> Any:
        """The result of one operation, past HTTP."""
        return self._answer(op, payload)["ok"]

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


class Engines(FakeEngine):
    """Several of them behind the service's own merging of their answers, as for vLLM's."""

    def __init__(self, *parts: PoolEngine) -> None:
        super().__init__()
        self.parts = list(parts)

    async def call_utility_async(self, name: str, op: str = "", payload: Any = None) -> Any:
        """As vLLM's call to one engine."""

        async def call_all(name: str, *args: Any) -> list[Any]:
            return [await part.call_utility_async(name, *args) for part in self.parts]

        return await AllEngines(call_all)(name, *([op, payload] if op else []))


def _metrics_of(engine: PoolEngine) -> Any:
    """The real collector over the engine's snapshot, read at each scrape."""
    collector, registry = VTokenCollector("tiny", engine.config.to_dict()), CollectorRegistry()
    register(collector, registry)

    async def get_metrics(_: Any) -> Response:
        collector.update(engine.ask("snapshot"))
        return Response(generate_latest(registry), media_type="text/plain")

    return get_metrics


class UiServer:
    """A thread with an HTTP server; ``stop`` and ``start`` again keep the address."""

    def __init__(self, engine: FakeEngine, **door: Any) -> None:
        self.door = Door(engine, **door)
        self.app = self.door.app
        blocks.attach(self.app)
        health.attach(self.app)
        ui.attach(self.app)
        if isinstance(engine, PoolEngine):
            self.app.add_route("/metrics", _metrics_of(engine))
        self.port = 0
        self.start()

    @property
    def root(self) -> str:
        """Where the service is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"{self.root}/vtoken/ui"

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
