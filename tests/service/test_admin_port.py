"""The second server: a real socket, the marked scope, and an end without fuss."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace

import httpx
import pytest

from service import admin_port
from service.auth_access import ON_ADMIN_PORT
from service.errors import UsageError

ARGS = Namespace(ssl_keyfile=None, ssl_certfile=None)


async def app(scope, receive, send):
    """Says through which port a request came."""
    assert scope["type"] == "http"
    body = str(scope.get(ON_ADMIN_PORT)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_serves_until_cancelled():
    """Requests come marked; cancelling the task ends it and closes the port."""

    async def run() -> None:
        sock = admin_port.bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        task = asyncio.create_task(admin_port.serve(app, ARGS, sock))
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(30):
                answer = await client.get(f"http://127.0.0.1:{port}/admin/policy")
        assert answer.text == "True"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


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
