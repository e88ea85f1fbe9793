"""What the commands for a running service share: where it is, the key, and what can go wrong.

Nothing here imports vLLM: a command answers in a fraction of a second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import httpx

from service.auth_keys import KeySources
from service.errors import UsageError
from service.settings.client import load_client_settings
from vtoken.errors import VTokenError

DEFAULT_URL = "http://127.0.0.1:8000"

EXIT_CODES = """\
exit codes:
  0  done
  1  the service cannot be reached, failed, or is not ready
  2  the command or a value in it is wrong
  3  the admin key is missing or wrong, or admin routes are closed
  4  the policy is no longer the version given with --if-version
"""


class CallError(VTokenError):
    """A call to the service failed; the message is one sentence."""

    exit_code: ClassVar[int] = 1


class RefusedError(CallError):
    """The service refused a value."""

    exit_code = 2


class KeyRefusedError(CallError):
    """The service wants another admin key."""

    exit_code = 3


class VersionError(CallError):
    """The policy changed meanwhile."""

    exit_code = 4


_REFUSALS: Mapping[int, type[CallError]] = {
    400: RefusedError,
    401: KeyRefusedError,
    403: KeyRefusedError,
    412: VersionError,
    413: RefusedError,
    422: RefusedError,
}


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaints are :class:`UsageError`, one sentence as all of ours."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise UsageError(f"{message}; see {self.prog} --help")


def make_parser(prog: str, description: str) -> CommandParser:
    """A parser with the options that every command for a running service has."""
    parser = CommandParser(
        prog=f"vtoken-serve {prog}",
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_connection(parser)
    return parser


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add ``--url``, ``--admin-key-file``, ``--timeout`` and ``--json``; mutates ``parser``."""
    group = parser.add_argument_group("the service")
    group.add_argument(
        "--url",
        help=f"where it is (default: VTOKEN_URL, else {DEFAULT_URL}); a path in it is kept",
    )
    group.add_argument(
        "--admin-url",
        metavar="URL",
        help="where its admin routes are, if on a port of their own (default: VTOKEN_ADMIN_URL, "
        "else as --url)",
    )
    group.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file with the admin key (default: VTOKEN_ADMIN_KEY, else VTOKEN_ADMIN_KEY_FILE); of "
        "several keys in it the first is used",
    )
    group.add_argument(
        "--timeout", type=_seconds, default=15.0, metavar="S", help="longest wait (default: 15)"
    )
    group.add_argument("--json", action="store_true", help="print JSON for programs")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 to 3600 seconds")
    return value


@dataclass(frozen=True)
class Answer:
    """What came back, whatever its status."""

    status: int
    body: Any


class Client:
    """Asks one service; use it as context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read where and with which key.

        Raises:
            UsageError: the address is none.
            ConfigError: the key file cannot be read.
        """
        settings = load_client_settings()
        self.url = _address("url", options.url or settings.url or DEFAULT_URL)
        self.admin_url = _address("admin-url", options.admin_url or settings.admin_url or self.url)
        self._key = _admin_key(options.admin_key_file) or settings.first_admin_key()
        self._http = httpx.Client(timeout=options.timeout, follow_redirects=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def has_key(self) -> bool:
        """Whether there is an admin key to send."""
        return self._key is not None

    def admin(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One call to an admin route.

        Raises:
            CallError: it was not answered with 2xx and an object; the class has the exit code.
        """
        answer = self._with_key(method, path, **options)
        if 200 <= answer.status < 300 and isinstance(answer.body, dict):
            return answer.body
        raise self._refusal(answer)

    def metrics(self) -> str:
        """The text of ``/metrics``, which may need a key; asked where the admin routes are, since
        the key is sent nowhere else.

        Raises:
            CallError: it was not answered with 200 and text; the class has the exit code.
        """
        answer = self._with_key("GET", "/metrics")
        if answer.status == 200 and isinstance(answer.body, str):
            return answer.body
        raise self._refusal(answer)

    def get(self, path: str) -> Answer:
        """One route of the service itself.

        Raises:
            CallError: no answer came.
        """
        return self._send(self.url, "GET", path)

    def _with_key(self, method: str, path: str, **options: Any) -> Answer:
        headers = dict(options.pop("headers", {}))
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return self._send(self.admin_url, method, path, headers=headers, **options)

    def _refusal(self, answer: Answer) -> CallError:
        return _REFUSALS.get(answer.status, CallError)(self._reason(answer))

    def _send(self, url: str, method: str, path: str, **options: Any) -> Answer:
        try:
            response = self._http.request(method, url + path, **options)
        except httpx.TimeoutException as error:
            raise CallError(f"no answer from {url} within the timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CallError(f"cannot reach {url}: {error}") from error
        try:
            return Answer(response.status_code, json.loads(response.content))
        except ValueError:
            return Answer(response.status_code, response.text)

    def _reason(self, answer: Answer) -> str:
        error = answer.body.get("error") if isinstance(answer.body, dict) else None
        if isinstance(error, dict) and "message" in error:
            hint = "" if self.has_key or answer.status != 401 else _NO_KEY
            return f"{error['message']}{hint}"
        if answer.status == 404:
            return f"{self.admin_url} has no such route: is it vtoken-serve, and of this version?"
        return f"{self.admin_url} answered {answer.status}"


_NO_KEY = " (no key was sent: set VTOKEN_ADMIN_KEY or give --admin-key-file)"


def _address(option: str, url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--{option}={url}: must begin with http:// or https://")
    return url.rstrip("/")


def _admin_key(file: Path | None) -> str | None:
    if file is None:
        return None
    return KeySources("admin", file=file).read()[0][1]


def print_json(document: object) -> None:
    """One document on standard output."""
    print(json.dumps(document, ensure_ascii=False))
