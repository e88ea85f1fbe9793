"""Texts and tasks of the quality benchmark, made from what every machine with Python has.

text          a real text is continued: English prose (the Python language reference), program
              code (argparse) and legal prose (this repository's licence)
copy          a list of random words occurs in the prompt; it begins again and is continued
lookup        numbers of forty people, then the question for one of them, all in the prompt
lookup_later  the same, but the question comes after the prompt was compressed
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_PROMPT_TOKENS = 512
NUM_TEXT_TOKENS = 65
NUM_COPIED_TOKENS = 49
NAMES = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Henry",
    "Irene",
    "James",
    "Karen",
    "Louis",
    "Maria",
    "Niels",
    "Olive",
    "Peter",
    "Quinn",
    "Rosa",
    "Simon",
    "Tara",
    "Ulrich",
    "Vera",
    "Walter",
    "Xenia",
    "Yusuf",
    "Zoe",
    "Albert",
    "Beatrice",
    "Conrad",
    "Diana",
    "Edgar",
    "Fiona",
    "Gustav",
    "Helen",
    "Ivan",
    "Julia",
    "Kevin",
    "Laura",
    "Martin",
    "Nora",
]


@dataclass(frozen=True)
class Case:
    """A prompt and what follows it.

    Attributes:
        task: see the module docstring.
        prompt: tokens of the prefill.
        continuation: teacher-forced tokens; the first is predicted by the prefill alone.
        skip: leading predictions that do not count (cue or question).
    """

    task: str
    prompt: list[int]
    continuation: list[int]
    skip: int = 0


def make_cases(tokenizer: Any, tasks: list[str], repeats: int, rng: random.Random) -> list[Case]:
    """All cases of the tasks, reproducible for a state of ``rng``."""
    makers = {"text": _texts, "copy": _copies, "lookup": _lookups, "lookup_later": _lookups_later}
    return [case for task in tasks for case in makers[task](tokenizer, repeats, rng)]


def _texts(tokenizer: Any, repeats: int, rng: random.Random) -> Iterator[Case]:
    sources = (
        "\n\n".join(pydoc_data.topics.topics.values()),
        Path(argparse.__file__).read_text(),
        (Path(__file__).parents[1] / "LICENSE").read_text(),
    )
    length = NUM_PROMPT_TOKENS + NUM_TEXT_TOKENS
    for source in sources:
        tokens = tokenizer(source[:400_000])["input_ids"]
        for _ in range(repeats):
            start = rng.randrange(len(tokens) - length)
            text = tokens[start : start + length]
            yield Case("text", text[:NUM_PROMPT_TOKENS], text[NUM_PROMPT_TOKENS:])


def _copies(tokenizer: Any, repeats: int, rng: random.Random) -> Iterator[Case]:
    words = sorted({w for w in pydoc_data.topics.topics["assert"].split() if w.isalpha()})
    prose = tokenizer("\n\n".join(pydoc_data.topics.topics.values())[:400_000])["input_ids"]
    for _ in range(3 * repeats):
        segment = tokenizer(" ".join(rng.choices(words, k=120)))["input_ids"][:NUM_COPIED_TOKENS]
        cue, rest = segment[:16], segment[16:]
        filler = NUM_PROMPT_TOKENS - len(segment) - len(cue)
        before = rng.randrange(64, filler - 64)
        start = rng.randrange(len(prose) - filler)
        text = prose[start : start + filler]
        yield Case("copy", [*text[:before], *segment, *text[before:], *cue], rest)


def _people(rng: random.Random) -> tuple[str, dict[str, str]]:
    numbers = {name: str(rng.randrange(1000, 10_000)) for name in rng.sample(NAMES, len(NAMES))}
    lines = [f"The number of {name} is {number}." for name, number in numbers.items()]
    return "\n".join(lines) + "\n\n", numbers


def _lookups(tokenizer: Any, repeats: int, rng: random.Random) -> Iterator[Case]:
    yield from _questions("lookup", tokenizer, repeats, rng)


def _lookups_later(tokenizer: Any, repeats: int, rng: random.Random) -> Iterator[Case]:
    yield from _questions("lookup_later", tokenizer, repeats, rng)


def _questions(task: str, tokenizer: Any, repeats: int, rng: random.Random) -> Iterator[Case]:
    for _ in range(4 * repeats):
        text, numbers = _people(rng)
        name = rng.choice(sorted(numbers))
        facts = tokenizer(text)["input_ids"]
        question = tokenizer(f"Question: The number of {name} is")["input_ids"]
        answer = tokenizer(f" {numbers[name]}")["input_ids"]
        if task == "lookup":
            yield Case(task, [*facts, *question], answer)
        else:
            yield Case(task, facts, [*question, *answer], len(question) - 1)
