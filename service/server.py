"""The parts of a server: its socket, its answers while the engine starts, its app, its end.

:mod:`service.serve` makes a server of one process out of them, :mod:`service.supervisor` and
:mod:`service.api_process` one of several.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import ssl
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, MutableSequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from uvicorn.config import create_ssl_context
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import (
    build_and_serve,
)
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.entrypoints.launchers.launcher import create_server_socket, setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import decorate_logs

from service.drain import Drain
from service.embedded_model import ensure_embedded_model
from service.errors import StartError, UsageError
from service.settings.http_process import load_service_settings
from service.start_progress import StartProgress
from service.start_server import StartServer

EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1

logger = logging.getLogger(__name__)


def name_log(args: Namespace, process_name: str) -> None:
    """Put this process's name on its lines, and drop those that nobody wants."""
    decorate_logs(process_name)
    if not args.vtoken_has_own_log:
        _share_vllm_log("service", "vtoken")
    if not args.vtoken_access_log:
        logging.getLogger("service.access").setLevel(logging.WARNING)


def check_port_is_free(args: Namespace) -> None:
    """Bind and release the address, so that a taken port is known before the engine starts.

    Raises:
        UsageError: the address is in use or cannot be bound.
    """
    if args.uds:
        return
    try:
        create_server_socket((args.host or "", args.port), reuse_port=False).close()
    except (OSError, OverflowError) as error:
        raise _bind_error(args, error) from error


def check_engine_config(args: Namespace) -> None:
    """Build vLLM's configuration and check it, without starting an engine; mutates ``args``.

    Raises:
        UnsupportedError: the model or configuration cannot be served with the token layer.
        StartError: vLLM refused the model or the configuration.
    """
    if args.model is None:
        args.model = str(ensure_embedded_model())
    make_engine_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


def take_drain_seconds(args: Namespace) -> float:
    """How long a stop waits for open requests; mutates ``args``, where vLLM looks for it."""
    seconds: float = args.shutdown_timeout or load_service_settings().drain_seconds
    args.shutdown_timeout = math.ceil(seconds)
    return seconds


@dataclass(frozen=True)
class Listening:
    """Where to serve; ``peer_loads`` are vLLM's, of the processes that share the socket."""

    address: str
    sock: socket.socket
    peer_loads: tuple[MutableSequence[int], int] | None = None


async def serve(
    start: Callable[[contextlib.AsyncExitStack], Awaitable[Any]],
    where: Listening,
    args: Namespace,
    drain_seconds: float,
) -> int:
    """Serve an engine until stopped; closes the socket.

    Args:
        start: gives the engine's client, which the stack shuts down.
        where: the socket.
        args: vLLM's; mutated.
        drain_seconds: for open requests.

    Returns:
        The exit code; see :func:`service.serve.run`.
    """
    args.vtoken_drain = drain = Drain(drain_seconds)
    try:
        async with contextlib.AsyncExitStack() as stack:
            client = await start(stack)
            stop = _StopRecorder(client)
            http_shutdown = await build_and_serve(
                client, where.address, where.sock, args, where.peer_loads
            )
            was_requested = stop.was_requested  # leaving the block calls shutdown in any case
        await http_shutdown
    finally:
        where.sock.close()
    if drain.aborted_by:
        return 128 + drain.aborted_by
    if was_requested:
        return EXIT_STOPPED
    logger.error("the engine died; leaving with exit code %d", EXIT_ENGINE_DIED)
    return EXIT_ENGINE_DIED


@contextlib.contextmanager
def answering(
    sock: socket.socket, progress: StartProgress, tls: ssl.SSLContext | None
) -> Iterator[None]:
    """Answer probes on ``sock`` from a thread; afterwards connections wait for who serves next."""
    server = StartServer(sock, progress, tls)
    server.start()
    try:
        yield
    finally:
        server.stop()
        progress.remove()


def tls_context(args: Namespace) -> ssl.SSLContext | None:
    """As uvicorn will make it."""
    if not (args.ssl_keyfile and args.ssl_certfile):
        return None
    return create_ssl_context(
        args.ssl_certfile,
        args.ssl_keyfile,
        None,
        ssl.PROTOCOL_TLS_SERVER,
        args.ssl_cert_reqs,
        args.ssl_ca_certs,
        args.ssl_ciphers,
    )


def bind(args: Namespace) -> tuple[str, socket.socket]:
    """The address in words, and a socket bound to it.

    Raises:
        UsageError: it is taken or cannot be bound.
    """
    try:
        address, sock = setup_server(args, reuse_port=False)
    except OSError as error:
        raise _bind_error(args, error) from error
    return address, sock


class _CheckedEngineArgs(AsyncEngineArgs):
    """Refuses in this process what the token layer cannot serve, before an engine starts."""

    def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, then checked.

        Raises:
            UnsupportedError: every reason in one sentence.
            StartError: vLLM refused the model or the configuration.
        """
        from vtoken.integration.vllm.support import CONFIG_KEY, check_supported

        with _vllm_refusals():
            config = super().create_engine_config(*args, **kwargs)
        if CONFIG_KEY in (config.additional_config or {}):
            check_supported(config)
        return config


def make_engine_args(args: Namespace) -> AsyncEngineArgs:
    """vLLM's, checked.

    Raises:
        StartError: vLLM refused a setting.
    """
    with _vllm_refusals():
        engine_args: _CheckedEngineArgs = _CheckedEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    return engine_args


@contextlib.contextmanager
def _vllm_refusals() -> Iterator[None]:
    """Turn vLLM's refusal of a model or setting into one sentence; other errors pass.

    Raises:
        StartError: with vLLM's reason.
    """
    try:
        yield
    except ValidationError as error:
        reasons = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
        raise StartError(f"vLLM cannot serve this: {reasons}") from error
    except (ValueError, OSError) as error:
        raise StartError(f"vLLM cannot serve this: {error}") from error


class _StopRecorder:
    """Tells a requested stop from a death.

    On a signal vLLM's server stops its client through ``shutdown``; when the engine dies, it
    ends without. Both leave the client in the same state, and vLLM would exit with 0.
    """

    def __init__(self, client: Any) -> None:
        self.was_requested = False
        self._shutdown = client.shutdown
        client.shutdown = self

    def __call__(self, timeout: float | None = None) -> None:
        self.was_requested = True
        self._shutdown(timeout=timeout)


def _share_vllm_log(*names: str) -> None:
    """Let our loggers write where and from which level on vLLM's do."""
    vllm_logger = logging.getLogger("vllm")
    for name in names:
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = list(vllm_logger.handlers), vllm_logger.propagate
        ours.setLevel(vllm_logger.level)


def _bind_error(args: Namespace, error: Exception) -> UsageError:
    where = args.uds or f"{args.host or '0.0.0.0'}:{args.port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UsageError(f"{where} is already in use; choose another port with --port")
    return UsageError(f"cannot listen on {where}: {error}")
