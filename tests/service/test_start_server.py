"""The answer on the port while the engine starts, and the handover to the real server."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tqdm.std
import uvicorn

from service.server import answering, tls_context
from service.start_progress import (
    PHASES,
    StartProgress,
    StartProgressHandler,
    watch_checkpoint_files,
)
from tests.service.certificates import make_certificate


@pytest.fixture
def progress(tmp_path: Path) -> StartProgress:
    progress = StartProgress(tmp_path / "start.json")
    progress.write("starting_server", 0)
    return progress


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    """Bound and not listening, as vLLM makes it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


def url_of(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_probes_and_requests_while_it_starts(sock: socket.socket, progress: StartProgress) -> None:
    """Alive, not started with phase and percent, not ready, and 503 for the rest."""
    with answering(sock, progress, None), httpx.Client(base_url=url_of(sock), timeout=60) as client:
        progress.write("loading_weights", 40)
        assert client.get("/health/live").json() == {"status": "live"}
        for path in ("/health/startup", "/health/ready", "/health/startup?verbose=1"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert (answer.json()["phase"], answer.json()["percent"]) == ("loading_weights", 40)
            assert answer.json()["reasons"][0]["code"] == "starting"
        assert client.get("/health").status_code == 503
        work = client.post("/v1/chat/completions", content=b"x" * 100_000)
        assert (work.status_code, work.headers["retry-after"]) == (503, "5")
        assert work.json()["error"]["message"] == "the model is loading (loading_weights, 40 %)"
        assert client.head("/health/live").content == b""


def test_nobody_is_refused_at_the_handover(sock: socket.socket, progress: StartProgress) -> None:
    """Who connects between the two servers waits, and the real one answers."""

    async def real(scope, receive, send):  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"real"})

    with answering(sock, progress, None):
        assert httpx.get(url_of(sock) + "/x", timeout=60).status_code == 503
    answers: list[httpx.Response] = []
    early = [
        threading.Thread(target=lambda: answers.append(httpx.get(url_of(sock), timeout=60)))
        for _ in range(5)
    ]
    for thread in early:
        thread.start()
    server = uvicorn.Server(uvicorn.Config(real, lifespan="off", log_level="error"))
    serving = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    serving.start()
    for thread in early:
        thread.join(timeout=60)
    server.should_exit = True
    serving.join(timeout=60)
    assert [answer.text for answer in answers] == ["real"] * 5


def test_client_that_says_nothing_holds_nobody_up(
    sock: socket.socket, progress: StartProgress
) -> None:
    """Each connection has its own thread; half a request is nobody's harm."""
    with answering(sock, progress, None), socket.create_connection(sock.getsockname()) as silent:
        silent.sendall(b"GET /health")
        assert httpx.get(url_of(sock) + "/health/live", timeout=60).status_code == 200


def test_tls_is_spoken_where_the_server_will(
    sock: socket.socket, progress: StartProgress, tmp_path: Path
) -> None:
    """Probes with scheme HTTPS are answered, and plain text harms nobody."""
    make_certificate(tmp_path)
    names = ("keyfile", "certfile", "cert_reqs", "ca_certs", "ciphers")
    values = (tmp_path / "key", tmp_path / "cert", int(ssl.CERT_NONE), None, "TLSv1")
    args = SimpleNamespace(**{f"ssl_{n}": v for n, v in zip(names, values, strict=True)})
    with answering(sock, progress, tls_context(args)):
        with pytest.raises(httpx.TransportError):
            httpx.get(url_of(sock) + "/health/live")
        url = url_of(sock).replace("http:", "https:")
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert"))
        assert httpx.get(url + "/health/live", verify=trust, timeout=60).status_code == 200


def test_progress_goes_forward_only(progress: StartProgress) -> None:
    """Workers report on their own; the slowest does not turn it back."""
    progress.write("weights_loaded", 80)
    progress.write("loading_weights", 30)
    assert progress.read() == {"phase": "weights_loaded", "percent": 80}
    assert [percent for *_, percent in PHASES] == sorted(percent for *_, percent in PHASES)


@pytest.mark.parametrize("text", ["", "{", None])
def test_unreadable_progress_is_the_beginning(progress: StartProgress, text: str | None) -> None:
    """A probe is answered in any case."""
    progress.remove() if text is None else progress.path.write_text(text)
    assert progress.read() == {"phase": "starting_server", "percent": 0}


def test_answer_on_its_way_at_the_handover_does_not_go_back(progress: StartProgress) -> None:
    """Threads of the start server may answer after the file is gone: with what was said last."""
    progress.write("almost_there", 99)
    assert progress.read()["percent"] == 99
    progress.remove()
    assert progress.read() == {"phase": "almost_there", "percent": 99}


@pytest.mark.parametrize("phase", [row for row in PHASES if row[1] != "loading_weights"])
def test_messages_of_vllm_are_phases(progress: StartProgress, phase: tuple[str, str, int]) -> None:
    """By the beginning of the message; others are none, and no file comes back after the start."""
    handler = StartProgressHandler(progress.path)
    handler.emit(logging.makeLogRecord({"msg": "something else", "levelno": logging.INFO}))
    assert progress.read()["percent"] == 0
    handler.emit(logging.makeLogRecord({"msg": phase[0] + " and more %s", "args": (1,)}))
    assert progress.read() == {"phase": phase[1], "percent": phase[2]}
    progress.remove()
    handler.emit(logging.makeLogRecord({"msg": phase[0]}))
    assert not progress.path.exists()


def test_phases_are_messages_of_the_installed_vllm() -> None:
    """Each beginning stands in its source, so that an upgrade which rewords one is noticed."""
    root = vllm_folder()
    folders = (root / "v1", root / "model_executor" / "model_loader")
    text = "\n".join(
        path.read_text(errors="replace") for folder in folders for path in folder.rglob("*.py")
    )
    missing = [start for start, *_ in PHASES if f'"{start}' not in text]
    assert missing == []


def test_checkpoint_files_are_counted(
    progress: StartProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar over the files reports each one, shown or not, and is replaced once."""
    loader = SimpleNamespace(weight_utils=SimpleNamespace(tqdm=tqdm.std.tqdm))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", loader)
    watch_checkpoint_files(progress)
    bar = loader.weight_utils.tqdm
    watch_checkpoint_files(progress)
    assert loader.weight_utils.tqdm is bar
    seen = [(item, progress.read()["percent"]) for item in bar("abcd", disable=True)]
    assert seen == [("a", 10), ("b", 27), ("c", 45), ("d", 62)]
    assert progress.read()["phase"] == "loading_weights"


def test_bar_of_the_installed_vllm_is_the_one_replaced() -> None:
    """Both ways of reading safetensors loop over the module's name ``tqdm``."""
    text = (vllm_folder() / "model_executor/model_loader/weight_utils.py").read_text()
    assert text.count("in tqdm(\n") + text.count("= tqdm(\n") >= 2


def vllm_folder() -> Path:
    """Of the installed package, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
