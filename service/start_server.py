"""Answers on the port while the engine starts: 503 with the phase, instead of a refused connection.

It listens through a duplicate of the socket that the real server gets, so that the handover loses
no connection: whoever connects in between waits in the kernel's queue of the one socket.

``GET /health/live``  200        ``GET /health/startup``  503 with phase and percent
anything else         503 with ``Retry-After`` and OpenAI's error body
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from service.asgi import error_body
from service.start_progress import StartProgress

RETRY_AFTER_SECONDS = 5
_POLL_SECONDS = 0.05
_IDLE_SECONDS = 10.0


class StartServer(ThreadingHTTPServer):
    """Serves from a thread between :meth:`start` and :meth:`stop`.

    Args:
        sock: bound; it is duplicated and left as it is.
        progress: shown on ``/health/startup``.
        tls: certificate and so on, where the real server speaks TLS.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, sock: socket.socket, progress: StartProgress, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock.dup()
        self.progress = progress
        self._tls = tls
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="start-server", daemon=True
        )

    def start(self) -> None:
        """Listen and answer."""
        self.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Accept no more; the socket goes on listening for whoever has the original."""
        self.shutdown()
        self._thread.join()
        self.socket.close()

    def get_request(self) -> tuple[Any, Any]:
        """Accept; the TLS handshake is left to the connection's own thread."""
        connection, address = self.socket.accept()
        connection.settimeout(_IDLE_SECONDS)
        if self._tls is None:
            return connection, address
        wrapped = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return wrapped, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away or speaks nonsense is not our concern."""


class _Handler(BaseHTTPRequestHandler):
    server: StartServer
    protocol_version = "HTTP/1.0"  # every connection ends, and its client finds the real server

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/health/live"):
            self._send(200, {"status": "live"})
            return
        state = self.server.progress.read()
        if path.endswith(("/health/startup", "/health/ready")):
            reason = {"code": "starting", "message": f"the model is loading: {state['phase']}"}
            self._send(503, {"status": "starting", **state, "reasons": [reason]})
            return
        text = f"the model is loading ({state['phase']}, {state['percent']} %)"
        self._send(503, error_body(503, text))

    def _send(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", str(RETRY_AFTER_SECONDS))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Probes are no news."""

    def version_string(self) -> str:
        """The server's name in answers."""
        return "vtoken-serve"
