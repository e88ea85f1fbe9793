"""The tasks of the quality scenario: made once, then asked of every policy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loadtest import scoring
from loadtest.client import Client
from loadtest.documents import Document, excerpt
from loadtest.fleet import Arm, Engine, Fleet
from loadtest.scenarios.inputs import CONVERSATION, SYNTHETIC, long_text
from loadtest.scenarios.prefix import SMOKE_ENGINE
from loadtest.workloads import Lengths, hidden_fact

NUM_TOP = 20
CHUNK_TOKENS = 128
CHUNKED = Engine(flags={"max-num-batched-tokens": str(CHUNK_TOKENS)})
_CUE_WORDS, _COPIED_WORDS = 6, 24
_NUM_PAIRS = 20
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Size:
    """How much is measured; lengths in tokens."""

    identity_policies: tuple[str, ...]
    num_generations: int
    identity_prompt: int
    identity_output: int
    policies: tuple[str, ...]
    keep_ratios: tuple[float, ...]
    num_cases: int
    num_prompt_tokens: int
    scored_from: int
    num_continued: int
    identity_workload: str = CONVERSATION
    engine: Engine = CHUNKED

    def cells(self) -> Iterator[tuple[str, float]]:
        """Policy and keep ratio."""
        for policy in self.policies:
            for ratio in self.keep_ratios:
                yield policy, ratio


ALL = ("h2o", "snapkv", "scissorhands", "random", "streaming_llm", "paged_eviction")
SIZES = {
    "full": Size(("random", "h2o"), 72, 384, 96, ALL, (0.75, 0.5, 0.25), 12, 640, 256, 96),
    "quick": Size(("random",), 12, 256, 48, ("h2o", "random"), (0.5,), 4, 512, 256, 48),
    "smoke": Size(
        ("random",),
        1,
        96,
        24,
        ("random",),
        (0.5,),
        1,
        288,
        160,
        16,
        identity_workload=SYNTHETIC,
        engine=SMOKE_ENGINE,
    ),
}


@dataclass(frozen=True)
class Question:
    """A prompt whose answer is known.

    Attributes:
        prompt: token ids.
        answer: token ids of the right continuation.
        text: that must occur in the answer; empty: tokens are compared one by one.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    text: str = ""


@dataclass
class Damage:
    """All cases, and the answers of full attention to them once they are there."""

    size: Size
    texts: list[tuple[int, ...]]
    questions: dict[str, list[Question]]
    references: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    async def prepare(cls, client: Client, size: Size) -> Damage:
        """Make the cases; the same ones for every policy and every run."""
        rng = random.Random(0)
        document = long_text()
        length = size.num_prompt_tokens
        texts = [await _text(client, document, length, rng) for _ in range(size.num_cases)]
        makers = {"copy": _copy, "lookup": _lookup, "needle": _needle}
        questions = {
            task: [await make(client, document, length, rng) for _ in range(size.num_cases)]
            for task, make in makers.items()
        }
        return cls(size, texts, questions)

    async def measure(
        self, fleet: Fleet, arm: Arm, document: Mapping[str, Any]
    ) -> list[dict[str, float]]:
        """Metrics of each case under a policy document; the first call is full attention's."""
        forced = replace(arm, policy={**document, "evict_during_prefill": True})
        client = await fleet.client(forced)
        distributions = [await self._forced(client, text) for text in self.texts]
        client = await fleet.client(replace(arm, policy=document))
        continued = [await self._continue(client, text) for text in self.texts]
        if not self.references:
            pairs = zip(distributions, continued, strict=True)
            self.references = [{"top": top, "answer": answer} for top, answer in pairs]
        found = []
        for i, text in enumerate(self.texts):
            reference = self.references[i]
            metrics = self._distances(reference["top"], distributions[i], text)
            metrics |= _continuation(reference["answer"], continued[i])
            for task, questions in self.questions.items():
                metrics[f"{task}_match"] = await _ask(client, questions[i])
            found.append(metrics)
        return found

    async def _forced(self, client: Client, text: Sequence[int]) -> list[scoring.Distribution]:
        """Distributions after each token of a text, in tokens' ids."""
        answer = await client.complete(
            prompt=list(text), max_tokens=1, temperature=0, prompt_logprobs=NUM_TOP
        )
        entries = answer["choices"][0]["prompt_logprobs"]
        return scoring.read_prompt_logprobs(entries, text)

    async def _continue(self, client: Client, text: Sequence[int]) -> list[int]:
        answer = await client.complete(
            prompt=list(text),
            max_tokens=self.size.num_continued,
            temperature=0,
            return_token_ids=True,
        )
        return list(answer["choices"][0]["token_ids"])

    def _distances(
        self,
        reference: Sequence[scoring.Distribution],
        ours: Sequence[scoring.Distribution],
        text: Sequence[int],
    ) -> dict[str, float]:
        """KL, agreement of the most likely token, and log-likelihood of the text's late part."""
        places = range(self.size.scored_from, len(text) - 1)
        pairs = [(reference[i], ours[i]) for i in places]
        tokens = [str(text[i + 1]) for i in places]
        nll = -float(np.mean([q[token] for (_, q), token in zip(pairs, tokens, strict=True)]))
        return {
            "kl_top20": float(np.mean([scoring.kl_lower_bound(p, q) for p, q in pairs])),
            "top1_same": float(
                np.mean([scoring.top_token(p) == scoring.top_token(q) for p, q in pairs])
            ),
            "nll": nll,
            "perplexity": float(np.exp(nll)),
        }


def _continuation(reference: Sequence[int], ours: Sequence[int]) -> dict[str, float]:
    return {
        "rouge_l": scoring.rouge_l(ours, reference),
        "length_ratio": len(ours) / max(1, len(reference)),
        "same_until": scoring.common_prefix_ratio(ours, reference),
    }


async def _ask(client: Client, question: Question) -> float:
    """How much of the right answer comes; 0 or 1 for a text that must occur in it."""
    answer = await client.complete(
        prompt=list(question.prompt),
        max_tokens=len(question.answer) + (8 if question.text else 0),
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    choice = answer["choices"][0]
    if question.text:
        return float(question.text in choice["text"])
    return scoring.match_ratio(choice["token_ids"], question.answer)


async def _text(
    client: Client, document: Document, length: int, rng: random.Random
) -> tuple[int, ...]:
    return tuple((await client.tokenize(excerpt(document, 8 * length, rng)))[:length])


async def _copy(client: Client, document: Document, length: int, rng: random.Random) -> Question:
    """A list of made-up words in a text; it begins again and is to be continued."""
    words = ["".join(rng.choices(_LETTERS, k=rng.randint(3, 6))) for _ in range(_COPIED_WORDS)]
    cue = await client.tokenize("\nList: " + " ".join(words[:_CUE_WORDS]))
    rest = await client.tokenize(" " + " ".join(words[_CUE_WORDS:]))
    room = length - 2 * len(cue) - len(rest)
    if room < 2:
        room = 2
    text = await _text(client, document, room, rng)
    place = rng.randrange(room // 4, max(room // 4 + 1, 3 * room // 4))
    return Question((*text[:place], *cue, *rest, *text[place:], *cue), tuple(rest))


async def _lookup(client: Client, document: Document, length: int, rng: random.Random) -> Question:
    """Names with numbers, and the question for one of them."""
    names = ["".join(rng.choices(_LETTERS, k=5)) for _ in range(_NUM_PAIRS)]
    numbers = [str(rng.randrange(1000, 10_000)) for _ in names]
    lines = [f"The number of {n} is {x}." for n, x in zip(names, numbers, strict=True)]
    asked = rng.randrange(len(names))
    question = f"\n\nThe number of {names[asked]} is"
    ids = await client.tokenize("\n".join(lines) + question)
    return Question(tuple(ids), tuple(await client.tokenize(f" {numbers[asked]}")), numbers[asked])


async def _needle(client: Client, document: Document, length: int, rng: random.Random) -> Question:
    """A fact hidden in a long document."""
    name, number = "".join(rng.choices(_LETTERS, k=6)), str(rng.randrange(10_000, 100_000))
    fact = f"\nThe access code of room {name} is {number}.\n"
    question = f"\n\nThe access code of room {name} is"
    lengths = Lengths(1, length, 1)
    prompt = await hidden_fact(client, document, fact, question, lengths, rng)
    return Question(prompt, tuple(await client.tokenize(f" {number}")), number)
