"""An engine for the service's tests whose token layer and control calls are the real ones.

Between HTTP and the token layer only vLLM's socket and its scheduler's own decisions are missing:
requests are put into a model of the block pool by hand.
"""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

from tests.core_models import ModelPool, make_signals
from vtoken.config import VTokenConfig
from vtoken.integration.vllm.engine_core import vtoken_call
from vtoken.integration.vllm.options import generation_of, set_generation
from vtoken.integration.vllm.scheduler import VTokenScheduler
from vtoken.request_kv import RequestKV
from vtoken.request_options import RequestOptions
from vtoken.token_layer import TokenLayer


class LayerScheduler(VTokenScheduler):
    """The scheduler as the control calls see it, without vLLM's."""

    def __init__(self, layer: TokenLayer) -> None:
        self.layer = layer
        self.requests: dict[str, Any] = {}
        self.recent_relocations = deque()
        self.num_steps = 0

    def get_request_counts(self) -> tuple[int, int]:
        running = sum(req_id in self.layer.requests for req_id in self.requests)
        return running, len(self.requests) - running


class LayerEngine:
    """Has the client's side of vLLM's utility call."""

    def __init__(self, **config: Any) -> None:
        self.pool = ModelPool(256, 16)
        fields = {"budget_tokens": 64, "recent_tokens": 8, **config}
        self.layer = TokenLayer(VTokenConfig(**fields), self.pool)
        self.scheduler = LayerScheduler(self.layer)
        self.is_dead = False
        self.calls: list[str] = []

    async def call_utility_async(self, name: str, op: str, payload: Any) -> Any:
        assert name == "vtoken_call"
        self.calls.append(op)
        core = SimpleNamespace(scheduler=self.scheduler)
        sent = json.loads(json.dumps(payload))
        return json.loads(json.dumps(vtoken_call(core, op, sent), allow_nan=False))

    # -- requests --------------------------------------------------------------------------

    def arrive(self, req_id: str) -> None:
        """A client sends a request; it waits."""
        request = SimpleNamespace(
            num_tokens=0, num_computed_tokens=0, status=SimpleNamespace(name="RUNNING")
        )
        set_generation(request, self.layer.evictor.documents.generation)
        self.scheduler.requests[req_id] = request

    def admit(self, req_id: str, num_tokens: int, **options: Any) -> RequestKV:
        """A request that has arrived gets its blocks and its prefill is computed."""
        request = self.scheduler.requests[req_id]
        self.pool.start_request(req_id)
        assert self.pool.grow(req_id, num_tokens)
        kv = self.layer.admit(
            req_id,
            num_tokens,
            num_tokens,
            7,
            RequestOptions.parse({f"vtoken_{name}": value for name, value in options.items()}),
            generation_of(request),
        )
        self.layer.schedule_tokens(kv, 0, num_tokens)
        request.num_tokens = request.num_computed_tokens = num_tokens
        return kv

    def run(self, req_id: str, num_tokens: int = 200, **options: Any) -> RequestKV:
        """A request that arrives and is admitted at once."""
        self.arrive(req_id)
        return self.admit(req_id, num_tokens, **options)

    def step(self) -> None:
        """Every admitted request computes one token and is evicted from if due."""
        for req_id, kv in self.layer.requests.items():
            num_tokens = kv.num_tokens + 1
            assert self.pool.grow(req_id, num_tokens)
            self.layer.schedule_tokens(kv, num_tokens - 1, num_tokens)
            self.layer.evict_if_due(kv, num_tokens, make_signals(kv.table.live_ids()))
            self.scheduler.requests[req_id].num_tokens = num_tokens

    def preempt(self, req_id: str) -> None:
        """The request loses its blocks and waits again."""
        self.layer.forget(req_id)
        self.pool.release(req_id)

    def finish(self, req_id: str) -> None:
        """The request ends."""
        self.preempt(req_id)
        del self.scheduler.requests[req_id]
