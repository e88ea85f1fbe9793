"""Says on standard output that the server accepts requests, and how to ask it something."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from typing import Any

_INTERVAL_SECONDS = 0.05
_WILDCARDS = ("", "0.0.0.0", "::")


async def announce_when_ready(state: Any, args: Namespace, model: str, token_layer: str) -> None:
    """Wait until vLLM's HTTP server listens, then print the ready line and an example.

    Args:
        state: the app's state, on which vLLM puts its uvicorn server.
        args: vLLM's parsed arguments.
        model: the served model name.
        token_layer: mode and policy, in words.
    """
    await wait_until_started(state)
    print(ready_text(args, bound_port(state.server), model, token_layer), flush=True)


async def wait_until_started(state: Any) -> None:
    """Until vLLM's HTTP server, which it puts on the app's ``state``, accepts connections."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(_INTERVAL_SECONDS)


def bound_port(server: Any) -> int | None:
    """The port that a uvicorn server listens on; ``None`` for a Unix socket."""
    return port_of(server.servers[0].sockets[0])


def port_of(sock: Any) -> int | None:
    """The port that a socket is bound to; ``None`` for a Unix socket."""
    address = sock.getsockname()
    return int(address[1]) if isinstance(address, tuple) else None


def ready_text(args: Namespace, port: int | None, model: str, token_layer: str) -> str:
    """The ready line and, below it, a curl example."""
    url, option = base_url(args, port)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    where = f"unix:{args.uds}" if args.uds else url
    return (
        f"vtoken-serve ready on {where} (model {model}, {token_layer})\n"
        f"  curl {option}{url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )


def base_url(args: Namespace, port: int | None) -> tuple[str, str]:
    """The address to ask, and the curl option that it needs."""
    root = args.root_path or ""
    if args.uds:
        return f"http://localhost{root}", f"--unix-socket {args.uds} "
    host = "127.0.0.1" if (args.host or "") in _WILDCARDS else args.host
    host = f"[{host}]" if ":" in host else host
    scheme = "https" if args.ssl_keyfile and args.ssl_certfile else "http"
    return f"{scheme}://{host}:{port}{root}", ""
