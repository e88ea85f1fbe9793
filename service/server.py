"""Runs vLLM's own OpenAI server in this process, with our plugin in its app.

The order is vLLM's (``launchers/api_server/entry.py``): bind the port, start the engine, build
and serve the app, stop the engine. What is added: refusals before the engine starts, reasons in
one sentence, and an exit code that tells a stop from a death.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import uvloop
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import (
    build_and_serve,
    build_async_engine_client_from_engine_args,
)
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.entrypoints.launchers.launcher import create_server_socket, setup_server
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext

from service import arguments
from service.embedded_model import ensure_embedded_model
from service.errors import StartError, UsageError

EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1

logger = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Serve until stopped.

    Args:
        argv: every argument after ``vtoken-serve serve``.

    Returns:
        0 after SIGINT or SIGTERM, 1 if the engine died.

    Raises:
        UsageError, ConfigError: the arguments cannot be served, or the port is taken.
        UnsupportedError: the model or configuration cannot be served with the token layer.
        StartError: vLLM refused the model or the configuration, or the engine did not start.
        SystemExit: stopped by a signal while starting (128 + its number), or vLLM's parser.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # until vLLM's HTTP server handles them
        signal.signal(number, _leave)
    cli_env_setup()
    args, _ = arguments.parse(argv)
    configure_logging_from_args(args)
    _share_vllm_log("service", "vtoken")
    check_port_is_free(args)
    if args.model is None:
        args.model = str(ensure_embedded_model())
    return uvloop.run(_serve(args))


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
    _engine_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


async def _serve(args: Namespace) -> int:
    address, sock = _bind(args)
    try:
        async with contextlib.AsyncExitStack() as stack:
            client = await _start_engine(stack, args)
            stop = _StopRecorder(client)
            http_shutdown = await build_and_serve(client, address, sock, args)
            was_requested = stop.was_requested  # leaving the block calls shutdown in any case
        await http_shutdown
    finally:
        sock.close()
    if was_requested:
        return EXIT_STOPPED
    logger.error("the engine died; leaving with exit code %d", EXIT_ENGINE_DIED)
    return EXIT_ENGINE_DIED


async def _start_engine(stack: contextlib.AsyncExitStack, args: Namespace) -> Any:
    """The engine's client, which ``stack`` shuts down."""
    context = build_async_engine_client_from_engine_args(_engine_args(args))
    try:
        return await stack.enter_async_context(context)
    except RuntimeError as error:  # the engine process has printed its own reason
        raise StartError(f"the engine did not start: {error}") from error


def _bind(args: Namespace) -> tuple[str, socket.socket]:
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


def _engine_args(args: Namespace) -> _CheckedEngineArgs:
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


def _leave(number: int, _: object) -> NoReturn:
    """Signal handler: unwind, so that the engine's processes are stopped on the way.

    Not by KeyboardInterrupt: vLLM's ``zmq_socket_ctx`` swallows that while the engine starts,
    and then waits ten minutes for an engine that was abandoned.
    """
    raise SystemExit(128 + number)
