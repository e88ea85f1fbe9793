"""Several API processes before one engine (``--api-server-count``): starts, watches and stops them.

    supervisor ─┬─ engine core(s), as vLLM starts them
                └─ API processes 0 … n-1 (service.api_process), on one socket

The port is answered here while the model loads. A signal is passed on to the API processes, and
each lets its own requests finish; the engine is stopped after the last. Whatever process dies
unasked ends the server with exit code 1: a half of it would be hard to notice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor
from vllm.v1.utils import APIServerProcessManager

from service import admin_port, api_process, server
from service.drain import CLOSE_SECONDS, CUT_SECONDS
from service.endpoint_plugin import config_of, in_words
from service.errors import StartError
from service.follow import leave_with_parent
from service.operations import HURRY_SECONDS
from service.ready import port_of, ready_text
from service.settings.http_process import load_service_settings
from service.shared import Shared, make_shared
from service.start_folder import StartFolder
from vtoken.integration.vllm.compat.api_processes import SUPERVISOR, set_api_process
from vtoken.integration.vllm.compat.engine_processes import engine_processes_begin_with

POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


def run(args: Namespace, folder: StartFolder) -> int:
    """Serve until stopped; see :func:`service.serve.run` for codes and errors.

    Args:
        args: vLLM's, checked; mutated.
        folder: shared with the processes.
    """
    server.name_log(args, "Supervisor")
    address, sock = server.bind(args)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        args.vtoken_drain_seconds = server.take_drain_seconds(args)
        args.vtoken_shared = shared = _make_shared(args, folder, stack)
        with server.answering(sock, folder.progress, server.tls_context(args)):
            fleet, announce = _start(args, address, sock, stack)
        watch = Watch(fleet, args.vtoken_drain_seconds)
        return watch.until_stopped(lambda: shared.started.total() == shared.num_processes, announce)


def _make_shared(args: Namespace, folder: StartFolder, stack: contextlib.ExitStack) -> Shared:
    metrics = folder.path / "metrics"
    metrics.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)  # for the processes to come
    shared = make_shared(args.api_server_count, folder.path)
    settings = load_service_settings()
    if settings.admin_port is not None:
        shared.admin_sock = admin_port.bind(settings.admin_host, settings.admin_port)
        stack.callback(shared.admin_sock.close)
    return shared


class Fleet:
    """The processes of the server.

    Attributes:
        api: those that serve.
        engines: engine cores and, with several of them, vLLM's coordinator.
        close_seconds: for the engine to close what it has open.
    """

    def __init__(self, api: Sequence[BaseProcess], engines: Sequence[BaseProcess]) -> None:
        self.api = api
        self.engines = engines
        self.close_seconds: float = CLOSE_SECONDS

    def running(self) -> list[BaseProcess]:
        """API processes that have not ended."""
        return [process for process in self.api if process.is_alive()]


def _start(
    args: Namespace, address: str, sock: socket.socket, stack: contextlib.ExitStack
) -> tuple[Fleet, Callable[[], None]]:
    """Engines and API processes, which ``stack`` stops, and what says that they are ready."""
    engine_args = server.make_engine_args(args)
    set_api_process(engine_args, args.api_server_count, SUPERVISOR)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    listeners = bind_engine_zmq_listeners(config, args.api_server_count)
    # Kept until the end: it deletes its sockets' files when it is collected, and the engine may
    # connect to them long after the start.
    stack.callback(listeners.cleanup)
    executor, log_stats = Executor.get_class(config), not engine_args.disable_log_stats
    fleet = Fleet((), ())
    try:
        with (
            engine_processes_begin_with(leave_with_parent),
            launch_core_engines(config, executor, log_stats, listeners.addresses) as launch,
        ):
            for part in filter(None, (launch.coordinator, launch.engine_manager)):
                _stop_at_the_end(stack, part, fleet)
            manager = APIServerProcessManager(
                address,
                sock,
                args,
                args.api_server_count,
                listeners.inputs,
                listeners.outputs,
                target_server_fn=api_process.main,
                stats_update_address=launch.addresses.frontend_stats_publish_address,
                tensor_queue=launch.tensor_queue,
            )
            # They have ended by then, or the start failed and they have nothing to finish.
            stack.callback(manager.shutdown, timeout=0)
            launch.watched_frontend_processes = manager.processes
            fleet.api = manager.processes
    except RuntimeError as error:  # the process that failed has printed its own reason
        raise StartError(f"the server did not start: {error}") from error
    cores: Any = launch.engine_manager
    coordinator = [launch.coordinator.proc] if launch.coordinator else []
    fleet.engines = [*cores.processes, *coordinator]
    model = str(config.model_config.served_model_name)
    text = ready_text(args, port_of(sock), model, in_words(config_of(config)))
    return fleet, lambda: print(text, flush=True)


def _stop_at_the_end(stack: contextlib.ExitStack, part: Any, fleet: Fleet) -> None:
    stack.callback(lambda: part.shutdown(timeout=fleet.close_seconds))


class Watch:
    """Waits for the end of all API processes, and brings it about.

    Args:
        fleet: the processes.
        drain_seconds: that an API process waits for its open requests.
    """

    def __init__(self, fleet: Fleet, drain_seconds: float) -> None:
        self._fleet = fleet
        self._patience = drain_seconds + CUT_SECONDS + HURRY_SECONDS + CLOSE_SECONDS
        self._deadline: float | None = None  # set once it stops
        self._num_signals = self._aborted_by = 0
        self._failure = ""
        self._is_hopeless = False  # what is open can never end

    def until_stopped(self, is_ready: Callable[[], bool], announce: Callable[[], None]) -> int:
        """The exit code; ``announce`` is called once, as soon as ``is_ready``.

        Must be called in the main thread: it takes the signals.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        is_announced = False
        while running := self._fleet.running():
            processes = [*running, *self._living_engines()]
            connection.wait([process.sentinel for process in processes], POLL_SECONDS)
            self._look()
            if not is_announced and self._deadline is None and is_ready():
                is_announced = True
                announce()
        self._look()
        return self._exit_code()

    def _living_engines(self) -> list[BaseProcess]:
        return [process for process in self._fleet.engines if process.is_alive()]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._aborted_by = number
            self._fleet.close_seconds = 0
            self._tell()
        elif self._deadline is None:
            self._stop()

    def _stop(self) -> None:
        self._deadline = time.monotonic() + self._patience
        self._tell()

    def _tell(self) -> None:
        """The first time: finish what is open. The second: end it."""
        for process in self._fleet.running():
            process.terminate()

    def _look(self) -> None:
        """React to what has died, and to a stop that takes too long."""
        dead = [p for p in self._fleet.engines if not p.is_alive()]
        if dead and not self._is_hopeless and self._fleet.running():
            self._is_hopeless = True
            self._fail(f"{dead[0].name} died with exit code {dead[0].exitcode}")
            return
        if self._is_hopeless:
            self._tell()
        if self._deadline is None:
            for process in self._fleet.api:
                if process.exitcode is not None:
                    self._fail(f"{process.name} died with exit code {process.exitcode}")
                    return
        elif time.monotonic() > self._deadline:
            for process in self._fleet.running():
                logger.error("stopping: %s does not end; it is killed", process.name)
                process.kill()

    def _fail(self, what: str) -> None:
        self._failure = self._failure or what
        logger.error("%s; the server stops", what)
        if self._deadline is None:
            self._stop()

    def _exit_code(self) -> int:
        if self._aborted_by and not self._failure:
            return 128 + self._aborted_by
        as_asked = (server.EXIT_STOPPED, 128 + signal.SIGTERM, 128 + signal.SIGINT)
        ended_badly = [p.name for p in self._fleet.api if p.exitcode not in as_asked]
        if self._failure or ended_badly:
            why = self._failure or f"{ended_badly[0]} ended badly"
            logger.error("%s; leaving with exit code %d", why, server.EXIT_ENGINE_DIED)
            return server.EXIT_ENGINE_DIED
        return server.EXIT_STOPPED
