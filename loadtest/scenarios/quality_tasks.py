"""The cases of the quality scenario: contexts that are cut, and what is teacher-forced behind.

text    a document goes on
copy    a list of made-up words begins again and goes on
lookup  numbers of several names are asked for
needle  facts are asked for

The list, the names with their numbers, and the facts lie in one context, with prose between them.
All of it is asked for after the cut, so no policy knows what will be needed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.client import Client
from loadtest.documents import Document, excerpt
from loadtest.workloads import CHARACTERS_PER_TOKEN, LETTERS

TASKS = ("text", "copy", "lookup", "needle")
_MAX_ASKED = 6


@dataclass(frozen=True)
class Passage:
    """A text whose tail is teacher-forced behind a context that was cut.

    Attributes:
        prompt: token ids of context and tail.
        scored: by task, places in the prompt whose tokens count. The first of the tail never does:
            it is predicted before anything is evicted.
    """

    prompt: tuple[int, ...]
    scored: Mapping[str, tuple[int, ...]]


Case = tuple[Passage, ...]
"""Running text, and what is to be recalled (if anything): every task once."""


async def make_cases(
    client: Client,
    document: Document,
    num_cases: int,
    num_context: int,
    num_text: int,
    *,
    with_recall: bool = True,
) -> list[Case]:
    """Cases that are the same for every policy and every run.

    Args:
        client: of the service, as tokenizer.
        document: long text.
        num_cases: how many.
        num_context: tokens of every context.
        num_text: tokens that follow in ``text``.
        with_recall: whether lists, numbers and facts are to be recalled, too.
    """
    maker = _Maker(client, document, num_context, random.Random(0))
    cases = list[Case]()
    for _ in range(num_cases):
        text = await maker.text(num_text)
        cases.append((text, await maker.recall()) if with_recall else (text,))
    return cases


@dataclass(frozen=True)
class _Item:
    """Something to be recalled: its token ids in the context are ``cue`` and ``answer``.

    The space before a number belongs to the cue: SmolLM2's tokenizer gives it a token of its own,
    which is no answer.
    """

    task: str
    cue: list[int]
    answer: list[int]
    end: list[int]


class _Maker:
    def __init__(
        self, client: Client, document: Document, num_context: int, rng: random.Random
    ) -> None:
        self._client, self._document, self._rng = client, document, rng
        self._num_context = num_context

    async def text(self, num_text: int) -> Passage:
        total = self._num_context + num_text
        scored = tuple(range(self._num_context + 1, total))
        return Passage(await self._prose(total), {"text": scored})

    async def recall(self) -> Passage:
        words, facts, numbers = await self._list(), await self._facts(), await self._numbers()
        room = self._num_context * 7 // 8 - _length([words, *facts])
        while len(numbers) > 1 and _length(numbers) > room:
            numbers.pop()
        prompt = await self._context([words, *facts, *numbers])
        scored: dict[str, list[int]] = {task: [] for task in TASKS[1:]}
        self._rng.shuffle(facts)
        for item in (words, *facts, *self._rng.sample(numbers, min(_MAX_ASKED, len(numbers)))):
            prompt += item.cue
            scored[item.task] += range(len(prompt), len(prompt) + len(item.answer))
            prompt += item.answer + item.end
        return Passage(tuple(prompt), {task: tuple(places) for task, places in scored.items()})

    async def _list(self) -> _Item:
        words = [self._word(self._rng.randint(3, 6)) for _ in range(self._num_context // 24)]
        num_cue = len(words) // 4
        cue, answer = " ".join(words[:num_cue]), " ".join(words[num_cue:])
        return await self._item("copy", f"\nList: {cue}", f" {answer}")

    async def _facts(self) -> list[_Item]:
        count = max(1, self._num_context // 128)
        pairs = [(self._word(6), self._rng.randrange(10_000, 100_000)) for _ in range(count)]
        cue = "\nThe access code of room {} is "
        return [await self._item("needle", cue.format(n), str(x)) for n, x in pairs]

    async def _numbers(self) -> list[_Item]:
        count = self._num_context // 32
        pairs = [(self._word(5), self._rng.randrange(1000, 10_000)) for _ in range(count)]
        cue = "\nThe number of {} is "
        return [await self._item("lookup", cue.format(n), str(x)) for n, x in pairs]

    async def _item(self, task: str, cue: str, answer: str) -> _Item:
        parts = [await self._client.tokenize(part) for part in (cue, answer, ".")]
        return _Item(task, *parts)

    async def _context(self, items: Sequence[_Item]) -> list[int]:
        """Prose with the items in it, in random order, at random places."""
        prose = await self._prose(self._num_context - _length(items))
        places = sorted(self._rng.choices(range(len(prose) + 1), k=len(items)))
        found, begin = list[int](), 0
        for place, item in zip(places, self._rng.sample(items, len(items)), strict=True):
            found += [*prose[begin:place], *item.cue, *item.answer, *item.end]
            begin = place
        return [*found, *prose[begin:]]

    async def _prose(self, num_tokens: int) -> tuple[int, ...]:
        text = excerpt(self._document, num_tokens * CHARACTERS_PER_TOKEN, self._rng)
        return tuple((await self._client.tokenize(text))[:num_tokens])

    def _word(self, length: int) -> str:
        return "".join(self._rng.choices(LETTERS, k=length))


def _length(items: Sequence[_Item]) -> int:
    return sum(len(item.cue) + len(item.answer) + len(item.end) for item in items)
