"""What H2O and Scissorhands would retain, from the plain model's own attention in float64.

Hugging Face transformers, eager attention, no cache, no vLLM and none of ``vtoken.scores``: the
finished sequence runs through the model with a mask of what the reference itself has evicted so
far; whenever it evicts, the later rows of attention change and it runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.engine.oracle import eviction_mask


@dataclass(frozen=True)
class Rules:
    """The configuration of the engine that is compared."""

    layers: tuple[int, ...]
    budget: int
    sinks: int
    recent: int
    evict_interval: int
    score_interval: int
    window: int


@dataclass(eq=False)
class Scores:
    """Importance per token: mass, and observations above the mean, oldest first."""

    mass: np.ndarray
    hits: list[list[bool]] = field(default_factory=list)

    def observe(self, row: np.ndarray, live: list[int]) -> None:
        """One query's weights over all tokens, heads and layers averaged."""
        self.mass[: len(row)] += row
        self.hits.append([bool(i < len(row) and row[i] > 1 / len(live)) for i in self._all()])

    def of(self, policy: str, token: int) -> float:
        """The token's importance by this policy."""
        if policy == "h2o":
            return float(self.mass[token])
        return float(sum(observation[token] for observation in self.hits[-64:]))

    def _all(self) -> range:
        return range(len(self.mass))


class ReferenceEviction:
    """The reference model, loaded once."""

    def __init__(self, model_path: str, rules: Rules) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._rules = rules

    def run(self, policy: str, prompt: list[int], tokens: list[int]) -> dict[int, set[int]]:
        """Retained tokens after each eviction, by the logical length at which it happens."""
        rules, sequence = self._rules, (prompt + tokens)[:-1]
        scores = Scores(np.zeros(len(sequence)))
        evictions: list[tuple[int, list[int]]] = []
        retained: dict[int, set[int]] = {}
        live: list[int] = []
        rows = self._attention(sequence, evictions)
        due = len(prompt)
        for length in range(1, len(sequence) + 1):
            live.append(length - 1)
            in_window = len(prompt) - rules.window < length <= len(prompt)
            in_decode = length > len(prompt) and (due - length) % rules.score_interval == 0
            if in_window or in_decode:
                scores.observe(rows[length - 1, :length], live)
            if length == due:
                due += rules.evict_interval
                victims = self._victims(policy, scores, live, length)
                live = [token for token in live if token not in victims]
                evictions.append((length, sorted(victims)))
                retained[length] = set(live)
                rows = self._attention(sequence, evictions)
        return retained

    def _victims(self, policy: str, scores: Scores, live: list[int], length: int) -> set[int]:
        rules = self._rules
        candidates = [t for t in live if rules.sinks <= t < length - rules.recent]
        ranked = sorted(candidates, key=lambda token: (scores.of(policy, token), token))
        return set(ranked[: len(live) - rules.budget])

    @torch.inference_mode()
    def _attention(self, sequence: list[int], evictions: Any) -> np.ndarray:
        """Weights ``[length, length]``, mean over heads and sampled layers, float64."""
        mask = eviction_mask(len(sequence), evictions)[None, None]
        out = self._model(torch.tensor([sequence]), attention_mask=mask, output_attentions=True)
        sampled = [out.attentions[i][0].double().mean(0) for i in self._rules.layers]
        return torch.stack(sampled).mean(0).numpy()
