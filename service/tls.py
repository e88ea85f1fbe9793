"""Certificates that are replaced on disk while the server runs (``--enable-ssl-refresh``).

vLLM has the kernel watch the files that the paths lead to at the start. A renewed Kubernetes Secret
is another file behind the same path, and so is one that is moved into place: vLLM sees the first
renewal and none after it. Here the paths are looked at, once a second, for both ports.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from service.fingerprint import fingerprint
from service.ready import wait_until_started

logger = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 1.0

Fingerprint = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CertificateFiles:
    """The files that a server's TLS is made of, as vLLM's flags name them.

    Attributes:
        certificate: with its chain.
        key: of the certificate; None if it is in the same file.
        authorities: that sign clients' certificates; None if clients need none.
        first: the fingerprint when this was made, which is before any server read them.
    """

    certificate: str
    key: str | None
    authorities: str | None
    first: Fingerprint = field(init=False)

    def __post_init__(self) -> None:
        """Look for the first time."""
        object.__setattr__(self, "first", self.fingerprint())

    def fingerprint(self) -> Fingerprint:
        """Equal as long as nothing was replaced or written."""
        paths = (self.certificate, self.key, self.authorities)
        return tuple(fingerprint(path) for path in paths if path is not None)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Serve what is in the files from the next handshake on; mutates ``context``.

        An authority that was taken away stays trusted until a restart: OpenSSL forgets none.

        Raises:
            OSError: they cannot be read, or do not belong together; ``context`` is as it was.
        """
        # A certificate without its key would leave the context with neither.
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load(context)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key)
        if self.authorities is not None:
            context.load_verify_locations(self.authorities)


def take_refresh(args: Namespace) -> CertificateFiles | None:
    """The files to look at, if vLLM's flags ask for that; mutates ``args``: vLLM does not, then.

    Call it before vLLM's HTTP server is made.
    """
    if not args.ssl_certfile or not args.enable_ssl_refresh:
        return None
    args.enable_ssl_refresh = False
    return CertificateFiles(args.ssl_certfile, args.ssl_keyfile or None, args.ssl_ca_certs or None)


async def follow(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Load the files whenever they change, for ever; mutates ``context``.

    Files that cannot be used are an error in the log, once, and the last good ones stay; they are
    tried again until they can.

    Args:
        context: of a server, made after ``files``.
        files: to look at.
    """
    told = loaded = files.first
    while True:
        await asyncio.sleep(CHECK_INTERVAL_SECONDS)
        found = files.fingerprint()
        if found == loaded:
            continue
        try:
            files.load_into(context)
        except OSError as error:  # ssl.SSLError, too
            if found != told:
                text = "the certificate in %s could not be read again, the last stays: %s"
                logger.error(text, files.certificate, error)
            told = found
        else:
            loaded = found
            logger.info("the certificate in %s was read again", files.certificate)


async def follow_on_main_port(state: Any, files: CertificateFiles) -> None:
    """:func:`follow` for vLLM's HTTP server, which it puts on the app's ``state``."""
    await wait_until_started(state)
    await follow(state.server.config.ssl, files)
