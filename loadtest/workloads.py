"""What is sent: lists of jobs that are the same for every arm and for every run with a seed.

A job is a prompt of token ids and a number of output tokens. Generation is greedy and does not end
early, so two arms compute the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from loadtest.documents import Document, excerpt
from loadtest.sharegpt import Thread

MIN_OUTPUT_TOKENS = 16
CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer needs; what is too long is cut."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Tokenizer(Protocol):
    """The service's tokenizer, as :class:`loadtest.client.Client` offers it."""

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""

    async def tokenize_chat(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of a conversation."""


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        prompt: token ids.
        max_tokens: output tokens; exactly so many come, for end-of-sequence is ignored.
        extra: more members of the request body.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Request body of ``POST /v1/completions``."""
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **self.extra,
        }


@dataclass(frozen=True)
class Lengths:
    """How many jobs of which size.

    Attributes:
        num_jobs: of the list.
        num_prompt_tokens: exactly for texts, at most for conversations.
        num_output_tokens: likewise.
    """

    num_jobs: int
    num_prompt_tokens: int
    num_output_tokens: int

    def described(self) -> dict[str, int]:
        """As results name them, where all jobs are sent at once."""
        return {
            "requests_at_once": self.num_jobs,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
        }


async def synthetic(tokenizer: Tokenizer, lengths: Lengths, seed: int) -> list[Job]:
    """Prompts of random letters in words, all of exactly the same length; no two alike."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(lengths.num_jobs):
        num_words = lengths.num_prompt_tokens + 1
        words = ("".join(rng.choices(LETTERS, k=rng.randint(2, 8))) for _ in range(num_words))
        ids = await tokenizer.tokenize(" ".join(words))
        jobs.append(Job(tuple(ids[: lengths.num_prompt_tokens]), lengths.num_output_tokens))
    return jobs


async def conversations(
    tokenizer: Tokenizer, threads: Sequence[Thread], lengths: Lengths, seed: int
) -> list[Job]:
    """Real conversations, asked for their next answer, as long as the real one was.

    Each job is a thread up to a user's message that was answered, the latest whose prompt fits
    into the limit; only such with at least half of the limit are taken. Drawn without replacement.

    Raises:
        ValueError: there are too few conversations of that length.
    """
    order = random.Random(seed).sample(range(len(threads)), len(threads))
    jobs: list[Job] = []
    for index in order:
        if len(jobs) == lengths.num_jobs:
            return jobs
        job = await _conversation(tokenizer, threads[index], lengths)
        if job is not None:
            jobs.append(job)
    if len(jobs) < lengths.num_jobs:
        raise ValueError(
            f"{len(jobs)} conversations of {lengths.num_prompt_tokens // 2} to "
            f"{lengths.num_prompt_tokens} tokens, {lengths.num_jobs} are asked for"
        )
    return jobs


async def _conversation(tokenizer: Tokenizer, thread: Thread, lengths: Lengths) -> Job | None:
    limit = lengths.num_prompt_tokens
    ends = [
        i + 1
        for i, message in enumerate(thread.messages[:-1])
        if message["role"] == "user"
        and limit * 2 <= _characters(thread.messages[: i + 1]) <= limit * CHARACTERS_PER_TOKEN
    ]
    for end in reversed(ends[-4:]):
        prompt = await tokenizer.tokenize_chat(thread.messages[:end])
        if limit // 2 <= len(prompt) <= limit:
            answer = await tokenizer.tokenize(thread.messages[end]["content"])
            num_output = min(max(len(answer), MIN_OUTPUT_TOKENS), lengths.num_output_tokens)
            return Job(tuple(prompt), num_output)
    return None


def _characters(messages: Sequence[Any]) -> int:
    return sum(len(message["content"]) for message in messages)


async def documents(
    tokenizer: Tokenizer, document: Document, lengths: Lengths, seed: int
) -> list[Job]:
    """Long documents with a fact hidden in them and a question for it at the end."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(lengths.num_jobs):
        name, number = "".join(rng.choices(LETTERS, k=6)), str(rng.randrange(10_000, 100_000))
        fact = f"\nThe access code of room {name} is {number}.\n"
        question = f"\n\nQuestion: What is the access code of room {name}?\nAnswer:"
        jobs.append(
            Job(
                await hidden_fact(tokenizer, document, fact, question, lengths, rng),
                lengths.num_output_tokens,
            )
        )
    return jobs


async def hidden_fact(
    tokenizer: Tokenizer,
    document: Document,
    fact: str,
    question: str,
    lengths: Lengths,
    rng: random.Random,
) -> tuple[int, ...]:
    """Exactly ``num_prompt_tokens`` ids: a text, ``fact`` inside it, ``question`` at its end."""
    fact_ids, question_ids = await tokenizer.tokenize(fact), await tokenizer.tokenize(question)
    num_text = lengths.num_prompt_tokens - len(fact_ids) - len(question_ids)
    if num_text < 0:
        return tuple([*fact_ids, *question_ids][-lengths.num_prompt_tokens :])
    text = await tokenizer.tokenize(excerpt(document, num_text * CHARACTERS_PER_TOKEN, rng))
    place = rng.randrange(num_text // 8, num_text - num_text // 8) if num_text > 8 else 0
    return tuple([*text[:place], *fact_ids, *text[place:num_text], *question_ids])


def poisson_offsets(num_jobs: int, requests_per_second: float, seed: int) -> list[float]:
    """Arrival times in seconds from the start; the first is 0, gaps are exponential."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / requests_per_second, max(0, num_jobs - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:num_jobs]
