"""Another vLLM on the same Prometheus: it serves the same model, and has no token layer."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def neighbour_of(url: str) -> Iterator[str]:
    """Serve what ``url`` has on ``/metrics``, but for ``vtoken_*``; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                    body = without_ours(answer.read().decode()).encode()
            except OSError:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def without_ours(page: str) -> str:
    """The exposition without lines about our families."""
    return "".join(line for line in page.splitlines(True) if "vtoken_" not in line)
