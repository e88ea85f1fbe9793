"""Two engines behind one API process, and SIGKILL to it; test_timeout_engine.py kills with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.server_process import are_gone, kill, wait_for
from tests.service.tiny_server import TinyServer, words

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_killed_server_leaves_no_process(tmp_path: Path) -> None:
    """Both engines, their workers and vLLM's coordinator end with it."""
    server = TinyServer(tmp_path, "--data-parallel-size", "2")
    try:
        server.wait_until_ready()
        assert server.complete(words(50), 20).status_code == 200
        assert len(server.workers()) == 2
        assert server.named("Coordinator")
        processes = server.descendants()
        server.process.kill()
        try:
            wait_for(lambda: are_gone(processes), 120)
        finally:
            kill(processes)
    finally:
        server.kill_all()
