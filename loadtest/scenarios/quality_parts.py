"""What is asked of every policy in the quality scenario, and how far the answers are apart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loadtest import scoring
from loadtest.client import Client
from loadtest.fleet import Arm, Engine, Fleet
from loadtest.scenarios.inputs import CONVERSATION, SYNTHETIC
from loadtest.scenarios.prefix import SMOKE_ENGINE
from loadtest.scenarios.quality_tasks import Case, Passage

FULL = "none"
"""The policy of full attention."""
NUM_TOP = 20
EXACT_FROM = 0.9
"""Keep ratio from which it is said whether a continuation is the same, word for word. Below it
hardly any is, which says nothing about how much worse it is."""


@dataclass(frozen=True)
class Cell:
    """What is compared with full attention.

    Attributes:
        label: in tables and files, with the keep ratio behind it.
        arm: the service that is asked, and its policy document.
        keep_ratio: share of the context's tokens that is kept.
    """

    label: str
    arm: Arm
    keep_ratio: float = 1.0

    @property
    def name(self) -> str:
        """Of its arm in the outcome."""
        return f"{self.label}@{self.keep_ratio:g}"


@dataclass(frozen=True)
class Size:
    """How much is measured; lengths in tokens. No policies: that part is left out.

    Without recall and with no tokens continued, running text is all that is asked: many more cases
    in the same time.
    """

    identity_policies: tuple[str, ...]
    num_generations: int
    identity_prompt: int
    identity_output: int
    policies: tuple[str, ...]
    keep_ratios: tuple[float, ...]
    num_cases: int
    num_context: int
    num_text: int
    num_continued: int
    with_recall: bool = True
    identity_workload: str = CONVERSATION
    base_engine: Engine = field(default_factory=Engine)
    num_parallel: int = 4
    with_fp8: bool = False

    def cells(self) -> list[Cell]:
        """Full attention again, and every policy at every ratio."""
        grid = [(policy, ratio) for policy in self.policies for ratio in self.keep_ratios]
        return [
            Cell("full", self.arm(FULL)),
            *(Cell(policy, self.arm(policy, ratio), ratio) for policy, ratio in grid),
        ]

    def arm(self, policy: str, keep_ratio: float | None = None) -> Arm:
        """A policy on the service that they all share."""
        document: dict[str, Any] = {"policy": policy}
        if keep_ratio is not None:
            document["keep_ratio"] = keep_ratio
        return Arm("damage", "naive", document, self.engine())

    def engine(self) -> Engine:
        """An engine that computes a context by itself and what follows it in the next step."""
        flags = {**self.base_engine.flags, "max-num-batched-tokens": str(self.num_context)}
        return replace(self.base_engine, flags=flags)


ALL = ("h2o", "snapkv", "scissorhands", "random", "streaming_llm", "paged_eviction")
RATIOS = (0.9, 0.75, 0.5, 0.25)
SIZES = {
    "full": Size(("random", "h2o"), 72, 256, 48, ALL, RATIOS, 40, 512, 256, 64, with_fp8=True),
    "quick": Size(("random",), 12, 256, 48, ("h2o", "random"), (0.9, 0.5), 4, 512, 256, 48),
    "smoke": Size(
        ("random",),
        1,
        96,
        24,
        ("random",),
        (0.5,),
        1,
        256,
        64,
        16,
        identity_workload=SYNTHETIC,
        base_engine=SMOKE_ENGINE,
    ),
}


Distributions = Sequence[scoring.Distribution]


@dataclass(frozen=True)
class Told:
    """What a service said to one case.

    Attributes:
        forced: of each passage, the distributions after each token.
        continued: token ids of the free continuation of the text's context; none if not asked for.
    """

    forced: Sequence[Distributions]
    continued: Sequence[int] | None


async def ask(fleet: Fleet, arm: Arm, cases: Sequence[Case], size: Size) -> list[Told]:
    """All cases under one policy document: teacher-forced, then continued freely.

    For the first part the cut comes between the context and its tail, in the middle of the
    prefill: one request at a time, so that a step is the context and nothing else. A continuation
    is cut after its prefill, and then as it grows, as in service.

    Raises:
        RuntimeError: nothing was evicted where something should have been.
    """
    cut = replace(arm, policy={**arm.policy, "evict_during_prefill": True})
    client = await fleet.client(cut)
    forced = [[await _force(client, part, arm) for part in case] for case in cases]
    if not size.num_continued:
        return [Told(passages, None) for passages in forced]
    client = await fleet.client(arm)
    contexts = [case[0].prompt[: size.num_context] for case in cases]
    continued = await asyncio.gather(*(_continue(client, c, size) for c in contexts))
    return [Told(*pair) for pair in zip(forced, continued, strict=True)]


def distances(case: Case, ours: Told, reference: Told, keep_ratio: float) -> dict[str, float]:
    """Metrics of one case against full attention."""
    found: dict[str, float] = {}
    for passage, told, full in zip(case, ours.forced, reference.forced, strict=True):
        for task, places in passage.scored.items():
            nll, nll_full = (_nll(passage, places, x) for x in (told, full))
            prefix = "" if task == "text" else f"{task}_"
            found |= {f"{prefix}nll": nll, f"{prefix}nll_above_full": nll - nll_full}
            if task == "text":
                found |= _divergence(places, told, full)
            else:
                found[f"{task}_match"] = _accuracy(passage, places, told)
    found["perplexity"] = float(np.exp(found["nll"]))
    if ours.continued is None or reference.continued is None:
        return found
    found |= {
        "rouge_l": scoring.rouge_l(ours.continued, reference.continued),
        "length_ratio": len(ours.continued) / max(1, len(reference.continued)),
        "same_until": scoring.common_prefix_ratio(ours.continued, reference.continued),
    }
    if keep_ratio >= EXACT_FROM:
        found["exact_match"] = float(ours.continued == reference.continued)
    return found


async def _force(client: Client, passage: Passage, arm: Arm) -> Distributions:
    receipt = {} if arm.is_off else {"vllm_xargs": {"vtoken_receipt": True}}
    answer = await client.complete(
        prompt=list(passage.prompt),
        max_tokens=1,
        temperature=0,
        prompt_logprobs=NUM_TOP if "text" in passage.scored else 1,
        **receipt,
    )
    policy = arm.policy.get("policy", FULL)
    if policy != FULL and not answer["vtoken"]["evicted_tokens"]:
        raise RuntimeError(f"{policy} evicted nothing between a context and its tail")
    entries = answer["choices"][0]["prompt_logprobs"]
    return scoring.read_prompt_logprobs(entries, passage.prompt)


async def _continue(client: Client, context: Sequence[int], size: Size) -> list[int]:
    answer = await client.complete(
        prompt=list(context), max_tokens=size.num_continued, temperature=0, return_token_ids=True
    )
    return list(answer["choices"][0]["token_ids"])


def _divergence(
    places: Sequence[int], ours: Distributions, reference: Distributions
) -> dict[str, float]:
    """KL and agreement of the most likely token."""
    pairs = [(reference[i - 1], ours[i - 1]) for i in places]
    same = [scoring.top_token(p) == scoring.top_token(q) for p, q in pairs]
    kl = [scoring.kl_lower_bound(p, q) for p, q in pairs]
    return {"kl_top20": float(np.mean(kl)), "top1_same": float(np.mean(same))}


def _nll(passage: Passage, places: Sequence[int], told: Distributions) -> float:
    """Nats per token."""
    return -float(np.mean([told[i - 1][str(passage.prompt[i])] for i in places]))


def _accuracy(passage: Passage, places: Sequence[int], told: Distributions) -> float:
    """Share of the tokens that are the most likely ones."""
    right = [scoring.top_token(told[i - 1]) == str(passage.prompt[i]) for i in places]
    return float(np.mean(right))
