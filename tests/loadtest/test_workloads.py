"""Jobs are the same for a seed and have the lengths asked for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from loadtest.documents import generated_document
from loadtest.sharegpt import Thread
from loadtest.workloads import (
    MIN_OUTPUT_TOKENS,
    Job,
    Lengths,
    conversations,
    documents,
    poisson_offsets,
    synthetic,
)

LENGTHS = Lengths(num_jobs=4, num_prompt_tokens=200, num_output_tokens=32)
DOCUMENT = generated_document()


class FourCharacters:
    """A token is up to four characters."""

    async def tokenize(self, text: str) -> list[int]:
        return [int.from_bytes(text[i : i + 4].encode()) for i in range(0, len(text), 4)]

    async def tokenize_chat(self, messages) -> list[int]:
        return await self.tokenize("".join(f"<{m['role']}>{m['content']}" for m in messages))


def make_thread(number: int, num_messages: int, num_characters: int = 120) -> Thread:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": f"{number} {i} ".ljust(num_characters, "y")}
        for i in range(num_messages)
    ]
    return Thread(str(number), tuple(messages))


THREADS = [make_thread(n, 2 + n % 9) for n in range(60)]


def make(workload, source, seed: int, lengths: Lengths = LENGTHS) -> list[Job]:
    arguments = (FourCharacters(), *([source] if source is not None else []), lengths, seed)
    return asyncio.run(workload(*arguments))


@pytest.mark.parametrize(
    ("workload", "source"),
    [(synthetic, None), (conversations, THREADS), (documents, DOCUMENT)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_jobs_are_deterministic_and_distinct(workload, source):
    """A seed gives the same jobs, another one others, and no two of a list are alike."""
    jobs = make(workload, source, 5)
    assert jobs == make(workload, source, 5)
    assert jobs != make(workload, source, 6)
    assert len({job.prompt for job in jobs}) == len(jobs) == LENGTHS.num_jobs


@pytest.mark.parametrize(("workload", "source"), [(synthetic, None), (documents, DOCUMENT)])
def test_lengths_are_exact(workload, source):
    """So that blocks can be predicted."""
    for job in make(workload, source, 0):
        assert len(job.prompt) == LENGTHS.num_prompt_tokens
        assert job.max_tokens == LENGTHS.num_output_tokens


def test_document_too_short_for_its_question_is_cut():
    """A smoke run's prompts are shorter than the question."""
    jobs = make(documents, DOCUMENT, 0, Lengths(1, 10, 4))
    assert len(jobs[0].prompt) == 10


def test_conversations_fit_and_are_not_short():
    """Half of the limit at least; the output is as long as the real answer, within bounds."""
    for job in make(conversations, THREADS, 0):
        assert 100 <= len(job.prompt) <= 200
        assert MIN_OUTPUT_TOKENS <= job.max_tokens <= 32


def test_too_few_conversations_are_an_error():
    """Rather than the same one twice."""
    with pytest.raises(ValueError, match="conversations of 100 to 200 tokens, 9 are asked for"):
        make(conversations, THREADS[:3], 0, Lengths(9, 200, 32))
    few = [make_thread(n, 8) for n in range(4)]
    assert len(make(conversations, few, 0)) == 4


def test_job_body_is_greedy_and_of_full_length():
    """Arms compute the same number of tokens; more members of the body can be given."""
    body = Job((1, 2), 8, {"logprobs": 1}).body()
    assert body == {
        "prompt": [1, 2],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential():
    """Deterministic for a seed; the first comes at once."""
    offsets = poisson_offsets(4001, 10.0, seed=1)
    gaps = np.diff(offsets)
    assert offsets[0] == 0.0
    assert len(offsets) == 4001
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.1)
    assert offsets == poisson_offsets(4001, 10.0, seed=1)
    assert offsets != poisson_offsets(4001, 10.0, seed=2)
    assert poisson_offsets(1, 10.0, seed=1) == [0.0]
    assert poisson_offsets(0, 10.0, seed=1) == []
