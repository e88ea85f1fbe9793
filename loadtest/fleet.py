"""The services that a scenario measures, started when first asked for and kept while needed.

An *arm* is a named configuration. Arms whose engine must differ (mode ``off``, block size, pool)
get services of their own. The others differ in the live policy document alone, which is patched
while nothing runs. In a measurement ``naive`` and ``lazy`` have services of their own too; only a
smoke run lets them share one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.client import Client
from loadtest.server import Server, flag_list

MAX_SERVICES = 4
"""Services kept at once; asking for another ends the one that was not used for longest."""

BLOCK_SIZE = 16
STOCK_BLOCK_SIZE = 32
"""In mode ``off``: the smallest that vLLM's CPU attention takes; the pool has the same bytes."""

DEFAULT_POLL_SECONDS = 1.0
"""Of a service as it is: seconds between two readings of its engine for ``/metrics``."""
_BASE_FLAGS: Mapping[str, str | bool] = {
    "enforce-eager": True,
    "enable-prefix-caching": False,
    "kv-cache-memory-bytes": "1G",  # the pool's size is given in blocks; this stops vLLM's guess
    "max-model-len": "2048",
    "max-num-batched-tokens": "2048",
    "max-num-seqs": "32",
    "seed": "0",
}


@dataclass(frozen=True)
class Engine:
    """What is fixed while an engine runs.

    Attributes:
        num_blocks: KV blocks of ``block_size`` tokens; the pool must hold ``max-model-len``.
        block_size: tokens per block (in mode ``off`` at least :data:`STOCK_BLOCK_SIZE`).
        flags: of ``vllm serve``, over the defaults of a load test.
        poll_seconds: between the service's own readings of its engine. Short, as ``/metrics`` is
            to show what was counted without a long wait; what is compared with stock vLLM in speed
            should have :data:`DEFAULT_POLL_SECONDS`.
        python_path: folder in which the service's processes look for modules and plugins first.
    """

    num_blocks: int = 1200
    block_size: int = BLOCK_SIZE
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    python_path: str = ""
    poll_seconds: float = 0.2

    def arguments(self, mode: str) -> list[str]:
        """Command line of the service."""
        size = max(self.block_size, STOCK_BLOCK_SIZE) if mode == "off" else self.block_size
        num_blocks = self.num_blocks * self.block_size // size
        own = {"block-size": str(size), "num-gpu-blocks-override": str(num_blocks)}
        own["vtoken-metrics-poll-seconds"] = f"{self.poll_seconds:g}"
        return flag_list({**_BASE_FLAGS, **own, **self.flags, "vtoken-mode": mode})


@dataclass(frozen=True)
class Arm:
    """A named configuration.

    Attributes:
        name: in tables and files.
        mode: ``off``, ``naive`` or ``lazy``.
        policy: fields of the live policy document; absent ones take their defaults.
        engine: what is fixed.
    """

    name: str
    mode: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    engine: Engine = Engine()

    @property
    def is_off(self) -> bool:
        """Whether nothing of the token layer is in the engine."""
        return self.mode == "off"


@dataclass
class _Service:
    client: Client
    server: Server | None
    defaults: dict[str, Any]


class Fleet:
    """Services by configuration; close it, or use it as an async context manager.

    Args:
        folder: for the services' logs.
        model: argument of ``serve``; empty for the embedded model.
        share_modes: let ``naive`` and ``lazy`` share a service.
        keep_services: :meth:`release` ends none, for a smoke run.
        url: measure this service instead of starting any.
        admin_key, api_key: of that service.
        environment: more variables for the services.

    Attributes:
        num_started: services so far.
        share_modes: as given.
        url: as given.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "",
        share_modes: bool = False,
        keep_services: bool = False,
        url: str = "",
        admin_key: str = "",
        api_key: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._model = model
        self.share_modes, self._keep_services = share_modes, keep_services
        self.url, self._keys = url, {"admin_key": admin_key, "api_key": api_key}
        self._engine: Engine | None = None
        self._environment = dict(environment or {})
        self._services: dict[str, _Service] = {}
        self.num_started = 0

    async def __aenter__(self) -> Fleet:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every service that was started."""
        for key in list(self._services):
            await self._end(key)

    async def client(self, arm: Arm) -> Client:
        """A client of the arm's service, its policy document in force.

        Raises:
            ServiceError: the policy document was refused.
            RuntimeError: the document in force is another than the arm's.
            StartError, ValueError: as :meth:`service`.
        """
        service = await self._service(arm)
        if not arm.is_off:
            document = whole_document(service.defaults, {**arm.policy, "mode": arm.mode})
            check_document(arm.name, document, await service.client.patch_policy(document))
        return service.client

    async def service(self, arm: Arm) -> Client:
        """A client of the arm's service, whatever policy is in force there: for questions whose
        answers no policy changes, such as how a text is cut into tokens.

        Raises:
            StartError: the service did not start.
            ValueError: the arm needs another engine than those before it, and the service at
                ``url`` has one.
        """
        return (await self._service(arm)).client

    async def _service(self, arm: Arm) -> _Service:
        self._check_engine(arm)
        key = self._key(arm)
        service = self._services.pop(key, None) or await self._start(arm)
        self._services[key] = service  # last in order: used last
        while len(self._services) > MAX_SERVICES:
            await self._end(next(iter(self._services)))
        return service

    def settle_seconds(self, arm: Arm) -> float:
        """After which ``/metrics`` of the arm's service surely shows what the engine counted."""
        return 2.5 * (DEFAULT_POLL_SECONDS if self.url else arm.engine.poll_seconds)

    async def release(self) -> None:
        """End all services, so that the next arm gets a fresh one and idle ones take no time."""
        if not self._keep_services:
            for key in list(self._services):
                await self._end(key)

    def _key(self, arm: Arm) -> str:
        mode = "on" if self.share_modes and not arm.is_off else arm.mode
        own = [mode, arm.engine.arguments(mode), arm.engine.python_path]
        return "" if self.url else json.dumps(own)

    def _check_engine(self, arm: Arm) -> None:
        if not self.url:
            return
        if arm.is_off:
            raise ValueError("mode off is a service of its own: it cannot be measured by --url")
        self._engine = self._engine or arm.engine
        if arm.engine != self._engine:
            theirs, ours = (" ".join(e.arguments("lazy")) for e in (self._engine, arm.engine))
            raise ValueError(f"--url is one engine; {arm.name} needs {ours}, others {theirs}")

    async def _start(self, arm: Arm) -> _Service:
        if self.url:
            client = Client(self.url, **self._keys)
            return _Service(client, None, await client.policy())
        self.num_started += 1
        name = re.sub(r"\W+", "-", arm.name)
        log = self._folder / f"service-{self.num_started:02}-{name}.log"
        model = [self._model] if self._model else []
        server = Server(
            [*model, *arm.engine.arguments(arm.mode)],
            log,
            self._environment,
            arm.engine.python_path,
        )
        try:
            url = await asyncio.to_thread(server.wait_ready)  # a signal may come meanwhile
            client = Client(url, admin_key=server.admin_key)
            defaults = {} if arm.is_off else await client.policy()
        except BaseException:
            server.stop()
            raise
        return _Service(client, server, defaults)

    async def _end(self, key: str) -> None:
        service = self._services.pop(key)
        await service.client.close()
        if service.server is not None:
            service.server.stop()


def whole_document(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a policy document: an arm's own over the defaults.

    What is ``None`` is sent as ``null``: a field that a patch leaves out keeps the value of the arm
    before. A document names a ratio or a number of tokens as the budget; the other is ``None``.
    """
    document = {**defaults, **own}
    if own.get("keep_ratio") is not None:
        document["budget_tokens"] = None
    elif own.get("budget_tokens") is not None:
        document["keep_ratio"] = None
    return document


def check_document(arm: str, wanted: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
    """Compare the document in force with the one that an arm asked for.

    Raises:
        RuntimeError: a field differs.
    """
    differing = {n: (v, in_force.get(n)) for n, v in wanted.items() if in_force.get(n) != v}
    if differing:
        told = ", ".join(f"{n}: wanted {a!r}, is {b!r}" for n, (a, b) in differing.items())
        raise RuntimeError(f"{arm} would be measured under another policy document: {told}")
