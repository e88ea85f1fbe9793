"""The second server: a real socket, the marked scope, and an end without fuss."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from service import admin_port
from service.auth_access import ON_ADMIN_PORT
from service.errors import UsageError
from service.tls import CHECK_INTERVAL_SECONDS, take_refresh
from tests.service.certificates import make_certificate

PLAIN = Namespace(
    ssl_keyfile=None,
    ssl_certfile=None,
    ssl_ca_certs=None,
    ssl_cert_reqs=int(ssl.CERT_NONE),
    ssl_ciphers=None,
    enable_ssl_refresh=False,
)
"""What vLLM's parser gives without flags."""
AES128, AES256 = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"


def with_tls(folder: Path, **others: object) -> Namespace:
    """Arguments with a new certificate."""
    make_certificate(folder)
    files = {"ssl_keyfile": str(folder / "key"), "ssl_certfile": str(folder / "cert")}
    return Namespace(**{**vars(PLAIN), **files, **others})


@contextlib.asynccontextmanager
async def serving(args: Namespace) -> AsyncIterator[int]:
    """The port of the app below."""
    sock = admin_port.bind("127.0.0.1", 0)
    task = asyncio.create_task(admin_port.serve(app, args, sock, take_refresh(args)))
    try:
        yield sock.getsockname()[1]
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def handshake(port: int, ciphers: str = AES128) -> tuple[bytes, str]:
    """The certificate that is served, and the cipher that was agreed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # ciphers of 1.3 cannot be chosen
    context.set_ciphers(ciphers)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object")
    certificate, cipher = found.getpeercert(binary_form=True), found.cipher()[0]
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return certificate, cipher


async def app(scope, receive, send):
    """Says through which port a request came."""
    assert scope["type"] == "http"
    body = str(scope.get(ON_ADMIN_PORT)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_serves_until_cancelled():
    """Requests come marked; cancelling the task ends it and closes the port."""

    async def run() -> None:
        async with serving(PLAIN) as port, httpx.AsyncClient() as client:
            async with asyncio.timeout(30):
                answer = await client.get(f"http://127.0.0.1:{port}/admin/policy")
        assert answer.text == "True"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()

    asyncio.run(run())


def test_ciphers_are_those_of_the_main_port(tmp_path):
    """A client that offers others is turned away."""

    async def run() -> None:
        async with serving(with_tls(tmp_path, ssl_ciphers=AES128)) as port, asyncio.timeout(30):
            assert (await handshake(port, f"{AES256}:{AES128}"))[1] == AES128
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await handshake(port, AES256)

    asyncio.run(run())


@pytest.mark.parametrize("refreshed", [False, True])
def test_certificate_is_replaced_as_on_the_main_port(tmp_path, refreshed):
    """With ``--enable-ssl-refresh`` without a restart, and else not."""

    async def run() -> None:
        args = with_tls(tmp_path, enable_ssl_refresh=refreshed)
        old = ssl.PEM_cert_to_DER_cert((tmp_path / "cert").read_text())
        async with serving(args) as port, asyncio.timeout(60):
            assert (await handshake(port))[0] == old
            make_certificate(tmp_path, 2)
            new = ssl.PEM_cert_to_DER_cert((tmp_path / "cert").read_text())
            if not refreshed:
                await asyncio.sleep(2 * CHECK_INTERVAL_SECONDS)
                assert (await handshake(port))[0] == old
            while refreshed and (await handshake(port))[0] != new:
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_idle_connections_are_kept_as_on_the_main_port(monkeypatch):
    """The server that closes first resets requests that are on their way."""
    assert admin_port.make_server(app, PLAIN).config.timeout_keep_alive > 60
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    assert admin_port.make_server(app, PLAIN).config.timeout_keep_alive == 7


def test_taken_port_is_said_in_one_sentence():
    """With the settings that choose it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="VTOKEN_ADMIN_PORT"):
            admin_port.bind("127.0.0.1", port)
    with pytest.raises(UsageError, match="no-such-host"):
        admin_port.bind("no-such-host.invalid", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0"])
def test_binds_every_kind_of_address(host):
    """Names, IPv4 and, where the machine has it, IPv6."""
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with admin_port.bind(host, 0) as sock:
        assert sock.getsockname()[1]
