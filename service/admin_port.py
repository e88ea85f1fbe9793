"""A second port for the admin routes, so that a network can keep them apart from the model's.

It serves the same app; the access middleware (:mod:`service.auth_access`) answers 404 to what
belongs to the other port. Probes, version and metrics are on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from argparse import Namespace
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from service.auth_access import ON_ADMIN_PORT
from service.errors import UsageError
from service.settings.vllm_variables import keep_alive_seconds
from service.tls import CertificateFiles, follow

logger = logging.getLogger(__name__)


class AdminPortApp:
    """Passes everything on to ``app``, marked as having come in through the admin port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope."""
        await self._app({**scope, ON_ADMIN_PORT: True}, receive, send)


class AdminServer(uvicorn.Server):
    """Leaves signals to vLLM's server; ends with the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handler."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        UsageError: the address is in use or cannot be bound.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], address[1]), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on {host}:{port} for the admin routes ({error}); "
            "choose another VTOKEN_ADMIN_PORT or VTOKEN_ADMIN_HOST"
        ) from error


def make_server(app: ASGIApp, args: Namespace) -> AdminServer:
    """A server of ``app``'s admin routes, with the main port's TLS, if it has it, and patience.

    Args:
        app: the whole app.
        args: vLLM's parsed arguments.
    """
    config = uvicorn.Config(
        AdminPortApp(app),
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive_seconds(),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
    )
    config.load()
    return AdminServer(config)


async def serve(
    app: ASGIApp, args: Namespace, sock: socket.socket, renewed: CertificateFiles | None = None
) -> None:
    """Serve the admin routes on ``sock`` until cancelled.

    Args:
        app: the whole app.
        args: vLLM's parsed arguments.
        sock: listening.
        renewed: the files of its certificate, if they are to be read again when they change.
    """
    host, port = sock.getsockname()[:2]
    logger.info("the admin routes are on %s port %d, and there only", host, port)
    server = make_server(app, args)
    tasks = []
    if renewed is not None:
        assert server.config.ssl is not None
        tasks.append(asyncio.create_task(follow(server.config.ssl, renewed)))
    with sock:
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            for listener in getattr(server, "servers", ()):
                listener.close()
