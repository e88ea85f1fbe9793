"""Certificates that are renewed on disk, as Kubernetes and others do it, on both ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import warnings
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from service import tls
from service.endpoint_plugin import make_plugin
from service.tls import CertificateFiles, follow, take_refresh
from tests.service.certificates import make_certificate

SECONDS = 60


class Mounted:
    """A Secret as Kubernetes mounts it: links to a link to a folder, and only that one is moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0

    def renew(self) -> bytes:
        """Another certificate; returns it."""
        self._number += 1
        new, old = (self.folder / f"..{self._number - n}" for n in (0, 1))
        new.mkdir()
        make_certificate(new, self._number)
        (self.folder / "..data_tmp").symlink_to(new.name)
        os.replace(self.folder / "..data_tmp", self.folder / "..data")
        for name in ("cert", "key"):
            with contextlib.suppress(FileExistsError):
                (self.folder / name).symlink_to(f"..data/{name}")
        shutil.rmtree(old, ignore_errors=True)
        return served_by(self.folder)


class Moved:
    """Files that are moved into place, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def renew(self) -> bytes:
        """Another certificate; returns it."""
        new = self.folder / "new"
        new.mkdir()
        make_certificate(new)
        for name in ("cert", "key"):
            os.replace(new / name, self.folder / name)
        new.rmdir()
        return served_by(self.folder)


def served_by(folder: Path) -> bytes:
    """The certificate in the files."""
    return ssl.PEM_cert_to_DER_cert((folder / "cert").read_text())


def make_args(folder: Path, **others: object) -> Namespace:
    """What vLLM's parser gives for ``--enable-ssl-refresh`` and the files."""
    names = {"ssl_certfile": str(folder / "cert"), "ssl_keyfile": str(folder / "key")}
    fixed = {"ssl_ca_certs": None, "ssl_cert_reqs": int(ssl.CERT_NONE), "ssl_ciphers": None}
    return Namespace(**{**names, **fixed, "enable_ssl_refresh": True, **others})


async def shown(port: int) -> bytes:
    """The certificate that a port serves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return bytes(found)


async def until_shown(port: int, expected: bytes) -> None:
    """Wait for it."""
    while await shown(port) != expected:
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def followed(folder: Path) -> AsyncIterator[int]:
    """The port of a server that follows the files."""
    files = take_refresh(make_args(folder))
    assert files is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=context)
    task = asyncio.create_task(follow(context, files))
    try:
        async with server, asyncio.timeout(SECONDS):
            yield server.sockets[0].getsockname()[1]
    finally:
        task.cancel()


@pytest.mark.parametrize("make", [Mounted, Moved])
def test_every_renewal_is_served(tmp_path: Path, make: Callable[[Path], Mounted | Moved]) -> None:
    """Not only the first."""

    async def run() -> None:
        files = make(tmp_path)
        first = files.renew()
        async with followed(tmp_path) as port:
            assert await shown(port) == first
            for _ in range(3):
                await until_shown(port, files.renew())

    asyncio.run(run())


def test_files_that_do_not_belong_together_leave_the_last_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said once; tried again until the key has come, too."""
    monkeypatch.setattr(tls, "CHECK_INTERVAL_SECONDS", 0.02)

    async def run() -> None:
        make_certificate(tmp_path)
        first = served_by(tmp_path)
        (tmp_path / "new").mkdir()
        make_certificate(tmp_path / "new", 2)
        async with followed(tmp_path) as port:
            os.replace(tmp_path / "new" / "cert", tmp_path / "cert")
            while not caplog.records:
                await asyncio.sleep(0.02)
            assert await shown(port) == first
            (tmp_path / "cert").rename(tmp_path / "away")
            while len(caplog.records) < 2:
                await asyncio.sleep(0.02)
            assert await shown(port) == first
            (tmp_path / "away").rename(tmp_path / "cert")
            os.replace(tmp_path / "new" / "key", tmp_path / "key")
            await until_shown(port, served_by(tmp_path))

    asyncio.run(run())
    assert len(caplog.records) <= 3
    assert all("the last stays" in record.message for record in caplog.records)


def test_authorities_are_read_again(tmp_path: Path) -> None:
    """Those that sign clients' certificates; one that was taken away stays until a restart."""
    make_certificate(tmp_path)
    files = CertificateFiles(*(str(tmp_path / name) for name in ("cert", "key", "cert")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files.load_into(context)
    assert context.cert_store_stats()["x509"] == 1
    make_certificate(tmp_path, 2)
    assert files.fingerprint() != files.first
    files.load_into(context)
    assert context.cert_store_stats()["x509"] == 2


@pytest.mark.parametrize("changes", [{"enable_ssl_refresh": False}, {"ssl_certfile": None}])
def test_nothing_is_followed_unless_asked_for(tmp_path: Path, changes: dict[str, object]) -> None:
    """vLLM's flags stay as they are."""
    args = make_args(tmp_path, **changes)
    before = vars(args).copy()
    assert take_refresh(args) is None
    assert vars(args) == before


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    """Certificate and key."""
    make_certificate(tmp_path)
    both = tmp_path / "both"
    both.write_text((tmp_path / "key").read_text() + (tmp_path / "cert").read_text())
    files = take_refresh(make_args(tmp_path, ssl_certfile=str(both), ssl_keyfile=None))
    assert files is not None
    files.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


@contextlib.asynccontextmanager
async def service(args: Namespace) -> AsyncIterator[int]:
    """vLLM's own HTTP server with our plugin, without an engine; its port."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.launcher import serve_http
    app, plugin = FastAPI(), make_plugin()
    plugin.attach_router(app)
    app.state.engine_client = None
    await plugin.init_state(None, app.state, args)
    options = {name: value for name, value in vars(args).items() if name.startswith("ssl_")}
    sock = socket.create_server(("127.0.0.1", 0))
    refresh = args.enable_ssl_refresh
    serving = serve_http(app, sock, refresh, port=0, lifespan="off", log_config=None, **options)
    task = asyncio.create_task(serving)
    try:
        async with asyncio.timeout(SECONDS):
            yield sock.getsockname()[1]
    finally:
        app.state.server.should_exit = True
        await (await task)
        for one in app.state.vtoken.tasks:
            one.cancel()


def test_both_ports_of_a_service_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's server and ours, with the flag that turns vLLM's own refresher on."""
    secret = Mounted(tmp_path)
    first = secret.renew()
    monkeypatch.setenv("VTOKEN_ADMIN_PORT", "0")

    async def run() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setattr("service.admin_port.bind", lambda *_: sock)
        async with service(make_args(tmp_path)) as port:
            ports = (port, sock.getsockname()[1])
            for one in ports:
                await until_shown(one, first)
            for _ in range(2):
                renewed = secret.renew()
                for one in ports:
                    await until_shown(one, renewed)

    asyncio.run(run())
