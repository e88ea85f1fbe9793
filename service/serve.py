"""``vtoken-serve serve``: runs vLLM's own OpenAI server, with our plugin in its app.

The order is vLLM's (``launchers/api_server/entry.py``): bind the port, start the engine, build
and serve the app, stop the engine. What is added: refusals before the engine starts, reasons in
one sentence, an answer on the port while the engine starts, a stop that lets accepted requests
finish, and an exit code that tells a stop from a death.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args

from service import arguments, server, supervisor
from service.embedded_model import ensure_embedded_model
from service.errors import StartError
from service.follow import leave_with_parent
from service.settings.vllm_variables import trace_endpoint
from service.signals import leave_on_signals
from service.start_folder import StartFolder
from service.start_progress import StartProgress
from vtoken.integration.vllm.compat.engine_processes import engine_processes_begin_with


def run(argv: Sequence[str], folder: StartFolder) -> int:
    """Serve until stopped.

    Args:
        argv: every argument after ``vtoken-serve serve``.
        folder: shared with the processes that vLLM starts.

    Returns:
        0 after SIGINT or SIGTERM, 1 if the engine died, 128 + the signal's number if a second
        signal cut the stop short.

    Raises:
        UsageError, ConfigError: the arguments cannot be served, or the port is taken.
        UnsupportedError: the model or configuration cannot be served with the token layer.
        StartError: vLLM refused the model or the configuration, or the engine did not start.
        StoppedWhileStarting: by a signal.
        SystemExit: vLLM's parser.
    """
    leave_on_signals()
    cli_env_setup()
    args, _ = arguments.parse(argv)
    _configure_log(args, folder)
    server.check_port_is_free(args)
    if args.model is None:
        args.model = str(ensure_embedded_model())
    args.otlp_traces_endpoint = args.otlp_traces_endpoint or trace_endpoint()
    if args.api_server_count:
        return supervisor.run(args, folder)
    return uvloop.run(_serve_alone(args, folder.progress))


def _configure_log(args: Namespace, folder: StartFolder) -> None:
    """Ours, unless a flag or variable names another configuration; mutates ``args``."""
    if hasattr(args, "log_level"):
        folder.configure_log(args.log_level)
    config = configure_logging_from_args(args)
    args.vtoken_has_own_log = config.pylogging_config_file == str(folder.log_file)
    args.vtoken_access_log = not args.disable_uvicorn_access_log
    args.disable_uvicorn_access_log = True  # service.gate writes that line, and knows more
    server.name_log(args, "APIServer")


async def _serve_alone(args: Namespace, progress: StartProgress) -> int:
    address, sock = server.bind(args)
    seconds = server.take_drain_seconds(args)

    async def start(stack: contextlib.AsyncExitStack) -> Any:
        with server.answering(sock, progress, server.tls_context(args)):
            return await _start_engine(stack, args)

    return await server.serve(start, server.Listening(address, sock), args, seconds)


async def _start_engine(stack: contextlib.AsyncExitStack, args: Namespace) -> Any:
    """The engine's client, which ``stack`` shuts down."""
    context = build_async_engine_client_from_engine_args(server.make_engine_args(args))
    try:
        with engine_processes_begin_with(leave_with_parent):
            return await stack.enter_async_context(context)
    except RuntimeError as error:  # the engine process has printed its own reason
        raise StartError(f"the engine did not start: {error}") from error
