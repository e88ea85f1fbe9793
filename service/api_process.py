"""One of several API processes of a server: what vLLM's manager of such processes starts.

It serves the whole app on the socket that all of them share, in front of an engine that the
supervisor (:mod:`service.supervisor`) has started and stops.
"""

from __future__ import annotations

import contextlib
import socket
from argparse import Namespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
from vllm.logger import configure_logging_from_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.system_utils import set_process_title

from service import server
from service.follow import follow_parent
from service.signals import leave_on_signals
from vtoken.integration.vllm.compat.api_processes import set_api_process


def main(address: str, sock: socket.socket, args: Namespace, client_config: dict[str, Any]) -> None:
    """Serve until stopped, then end this process.

    Args:
        address: of ``sock``, in words.
        sock: bound; shared with the others.
        args: vLLM's, with ``vtoken_shared``.
        client_config: how to reach the engine, and which process this is.

    Raises:
        SystemExit: with the code of :func:`service.serve.run`.
    """
    leave_on_signals()
    follow_parent()
    index = int(client_config["client_index"])
    args.vtoken_shared.index = index
    set_process_title("APIServer", str(index))
    configure_logging_from_args(args)
    server.name_log(args, f"APIServer_{index}")
    _load_parsers(args)
    raise SystemExit(uvloop.run(_serve(address, sock, args, client_config)))


async def _serve(
    address: str, sock: socket.socket, args: Namespace, client_config: dict[str, Any]
) -> int:
    loads = client_config.pop("api_server_loads")
    where = server.Listening(address, sock, (loads, client_config["client_index"]))

    async def start(stack: contextlib.AsyncExitStack) -> Any:
        engine_args = server.make_engine_args(args)
        set_api_process(engine_args, client_config["client_count"], client_config["client_index"])
        return await stack.enter_async_context(
            build_async_engine_client_from_engine_args(engine_args, client_config=client_config)
        )

    return await server.serve(start, where, args, args.vtoken_drain_seconds)


def _load_parsers(args: Namespace) -> None:
    """As vLLM's worker does, from files that the flags name."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
