"""Reads what comes with an admin request, strictly: a mistyped option must not pass unseen.

Values are left to the engine's own bounds; here only the form is checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from starlette.requests import Request

from service.errors import BadBodyError, BodyTooLargeError, RejectedError
from service.strict import RepeatedError, members
from service.text import encodable
from vtoken.config import unknown_field_hint

MAX_BODY_BYTES = 64 * 1024
MAX_INT = 10**18
"""What the message to the engine can carry is 64 bits wide."""

_MAX_INT_DIGITS = 18
ENTITY_TAG = r'^(\*|(W/)?"[0-9]{1,18}")$'
"""What ``If-Match`` may be."""

_FLAGS = {"": True, "true": True, "1": True, "false": False, "0": False}


async def read_body(request: Request) -> bytes:
    """The body.

    Raises:
        BodyTooLargeError: it has more than :data:`MAX_BODY_BYTES`; the rest is not read.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body may have at most {MAX_BODY_BYTES} bytes")
    return body


def parse_if_match(header: str | None) -> int | None:
    """The version in an ``If-Match`` header; ``None`` if absent or ``*``.

    Raises:
        BadBodyError: it is not one entity tag as this server gives out.
    """
    if header is None or header.strip() == "*":
        return None
    if not re.fullmatch(ENTITY_TAG, header.strip()):
        raise BadBodyError('If-Match must be * or one version in quotes, as in If-Match: "3"')
    return int(header.strip().removeprefix("W/").strip('"'))


def parse_flag(name: str, value: str) -> bool:
    """A boolean query parameter; present without value means yes.

    Raises:
        RejectedError: it is neither ``true`` nor ``false``.
    """
    if value.lower() not in _FLAGS:
        raise _rejected(name, value, "true or false")
    return _FLAGS[value.lower()]


def check_query(query: Iterable[tuple[str, str]], known: Iterable[str]) -> None:
    """Refuse parameters that do not exist: ``?dryrun=true`` must not change anything.

    Raises:
        RejectedError: names the first unknown or repeated one.
    """
    known, seen = frozenset(known), set()
    for name, value in query:
        if name not in known:
            raise _rejected(name, value, unknown_field_hint(name, known, "parameters"))
        if name in seen:
            raise _rejected(name, value, "given once")
        seen.add(name)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        BadBodyError: the body is not JSON, or has numbers or text that JSON does not allow.
        RejectedError: it is JSON but not an object, or a field is given twice.
    """
    try:
        document = json.loads(
            body,
            object_pairs_hook=members,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
        json.dumps(document, ensure_ascii=False).encode()  # refuses lone surrogates
    except RepeatedError as error:
        raise _rejected(error.name, error.value, "given once") from error
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise RejectedError(
            "the body must be a JSON object",
            field=None,
            value=type(document).__name__,
            bound="a JSON object",
        )
    return document


def parse_version(body: bytes) -> int | None:
    """``version`` in the body of a rollback; ``None`` if the body is empty or names none.

    Raises:
        BadBodyError, RejectedError: as :func:`parse_object`, or not a version.
    """
    document: Mapping[str, Any] = parse_object(body) if body.strip() else {}
    for name, value in document.items():
        if name != "version":
            raise _rejected(name, value, unknown_field_hint(name, {"version"}))
    version = document.get("version")
    whole = isinstance(version, int) and not isinstance(version, bool)
    if version is not None and not (whole and 1 <= version < MAX_INT):
        raise _rejected("version", version, "a version of the history, a whole number >= 1")
    return version


def _rejected(field: str, value: object, bound: str) -> RejectedError:
    field, shown = encodable(field[:200]), repr(value)[:200]
    message = f"{field}={shown} is not allowed: {bound}"
    return RejectedError(message, field=field, value=shown, bound=bound)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise ValueError("a whole number is too long")
    return int(digits)
