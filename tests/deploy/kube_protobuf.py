"""Reads the one message that helm sends as protobuf: the Secret in which it records a release.

Wire format: the magic ``k8s\\0``, then ``Unknown {typeMeta = 1; raw = 2}``, where ``raw`` is
``Secret {metadata = 1; data = 2; type = 3}``, with ``ObjectMeta {name = 1; namespace = 3;
resourceVersion = 6; labels = 11}``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"


def read_secret(body: bytes) -> dict[str, Any]:
    """The Secret as a JSON object."""
    raw = dict(_fields(body.removeprefix(MAGIC)))[2]
    secret = list(_fields(raw))
    (meta,) = [list(_fields(value)) for number, value in secret if number == 1]
    names = {1: "name", 3: "namespace"}
    metadata: dict[str, Any] = {names[n]: v.decode() for n, v in meta if n in names and v}
    metadata["labels"] = {k.decode(): v.decode() for k, v in _pairs(meta, 11)}
    data = {k.decode(): base64.b64encode(v).decode() for k, v in _pairs(secret, 2)}
    kind = {"apiVersion": "v1", "kind": "Secret", "type": dict(secret)[3].decode()}
    return {**kind, "metadata": metadata, "data": data}


def _pairs(fields: list[tuple[int, bytes]], number: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a map field."""
    for found, value in fields:
        if found == number:
            entry = dict(_fields(value))
            yield entry[1], entry.get(2, b"")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field; numbers are read over (none is needed)."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == 0:
            _, position = _varint(data, position)
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length, position = _varint(data, position)
            yield tag >> 3, data[position : position + length]
            position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
