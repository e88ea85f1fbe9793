"""The dense oracle: a model without cache, pages or vLLM.

The finished sequence runs once through the plain Hugging Face model in fp32 with eager
attention and an explicit mask built from the eviction log. It catches what no check of tables
can: a token whose slot is right and whose bytes are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Eviction = tuple[str, int, list[int]]


@dataclass(frozen=True)
class Verdict:
    """How an engine's result compares with the oracle.

    Attributes:
        num_tokens: sampled tokens compared.
        num_mismatches: tokens that are not the oracle's argmax.
        max_logprob_error: largest difference of a reported logprob.
        num_mismatches_without_mask: the same against full attention: how much the evictions
            matter, and so whether the comparison can fail at all.
    """

    num_tokens: int
    num_mismatches: int
    max_logprob_error: float
    num_mismatches_without_mask: int


class DenseOracle:
    """The reference model, loaded once."""

    def __init__(self, model_path: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def judge(self, result: dict[str, Any]) -> Verdict:
        """Compare all requests of one workload result of an engine arm."""
        verdicts = [
            self._judge_one(prompt, tokens, logprobs, _evictions_of(request, result["evictions"]))
            for request, prompt, tokens, logprobs in zip(
                result["ids"],
                result["prompts"],
                result["tokens"],
                result["logprobs"],
                strict=True,
            )
        ]
        return Verdict(
            sum(v.num_tokens for v in verdicts),
            sum(v.num_mismatches for v in verdicts),
            max(v.max_logprob_error for v in verdicts),
            sum(v.num_mismatches_without_mask for v in verdicts),
        )

    def _judge_one(
        self,
        prompt: list[int],
        tokens: list[int],
        logprobs: list[list[list[float]]],
        evictions: list[tuple[int, list[int]]],
    ) -> Verdict:
        sequence = torch.tensor([(prompt + tokens)[:-1]])
        expected = torch.empty(0)
        for start, of_life in lives_of(evictions):
            life = self._logprobs(sequence, eviction_mask(sequence.shape[1], of_life))
            expected = torch.cat([expected[:start], life[start:]])
        unmasked = self._logprobs(sequence, eviction_mask(sequence.shape[1], []))
        first = len(prompt) - 1
        rows, sampled = expected[first:], torch.tensor(tokens)
        errors = [
            abs(value - float(row[int(token)]))
            for row, step in zip(rows, logprobs, strict=True)
            for token, value in step
        ]
        return Verdict(
            len(tokens),
            int((rows.argmax(-1) != sampled).sum()),
            max(errors),
            int((unmasked[first:].argmax(-1) != sampled).sum()),
        )

    @torch.inference_mode()
    def _logprobs(self, sequence: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self._model(sequence, attention_mask=mask[None, None]).logits[0]
        return logits.log_softmax(-1)


def eviction_mask(length: int, evictions: list[tuple[int, list[int]]]) -> torch.Tensor:
    """Additive mask ``[length, length]``: causal, and blind to tokens from their eviction on.

    Args:
        evictions: ``(num_tokens, ids)``: queries at positions ``>= num_tokens`` no longer see
            ``ids``.
    """
    visible = torch.ones(length, length).tril().bool()
    for num_tokens, ids in evictions:
        visible[num_tokens:, ids] = False
    return torch.zeros(length, length).masked_fill(~visible, torch.finfo(torch.float32).min)


def lives_of(
    evictions: list[tuple[int, list[int]]],
) -> list[tuple[int, list[tuple[int, list[int]]]]]:
    """Evictions of each life of a request, with the first query that is computed in it.

    A preempted request is computed again with everything live. The log marks that with an
    eviction of nothing, at the number of tokens that had been computed.
    """
    lives: list[tuple[int, list[tuple[int, list[int]]]]] = [(0, [])]
    for num_tokens, ids in evictions:
        if ids:
            lives[-1][1].append((num_tokens, ids))
        else:
            lives.append((num_tokens, []))
    return lives


def _evictions_of(request: str, log: list[Eviction]) -> list[tuple[int, list[int]]]:
    return [(num_tokens, ids) for name, num_tokens, ids in log if name == request]
