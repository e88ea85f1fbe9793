"""What eviction costs in quality: policies × keep ratios against full attention.

The embedded model runs in Hugging Face transformers (float32, eager attention). Victims are
chosen by the engine's own token layer, policies and observation rules; evicted tokens are
hidden by the attention mask, which is what their absence from the rows of live slots amounts to
(the dense oracle of ``tests/engine`` proves that for the engine). Texts are teacher-forced in
chunks of one eviction interval, with an eviction after the prefill and after every chunk.

    python -m benchmarks.policy_quality --repeats 6 --out docs/evaluation/policy_quality.json

A run that was ended early goes on where it stopped with ``--resume`` and otherwise the same
arguments. ``--update --policies random`` measures one policy again and leaves the others.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.quality_results import Losses
from benchmarks.quality_tasks import Case, make_cases
from service.embedded_model import ensure_embedded_model
from vtoken.config import VTokenConfig
from vtoken.integration.vllm.observer import default_layers
from vtoken.observation import CACHE_SIGNALS, RequestSignals
from vtoken.policies.registry import POLICIES
from vtoken.request_kv import RequestKV
from vtoken.scores import key_norms, key_redundancy, value_key_ratio
from vtoken.token_layer import TokenLayer
from vtoken.types import BoolArray, IdArray

KEEP_RATIOS = (0.75, 0.5, 0.25)
INTERVAL = 16


class EndlessPool:
    """Implements :class:`vtoken.ports.BlockPoolPort`: block ids that nobody looks at."""

    block_size = 16
    num_total_blocks = 4096

    def num_free_blocks(self) -> int:
        """As many as there are."""
        return self.num_total_blocks

    def allocate(self, num_blocks: int) -> NDArray[np.int32]:
        """Never asked: nothing relocates."""
        raise NotImplementedError

    def free(self, block_ids: Any) -> None:
        """Nothing to do."""

    def shared(self, block_ids: NDArray[np.int32]) -> BoolArray:
        """No block is."""
        return np.zeros(len(block_ids), np.bool_)

    def new_blocks(self, req_id: str, start: int) -> NDArray[np.int32]:
        """Block ``i`` of the list has id ``i + 1``; enough for any text here."""
        return np.arange(start + 1, 257, dtype=np.int32)

    def replace(self, req_id: str, indices: Any, block_ids: Any) -> None:
        """Nothing to do."""

    def stop_caching(self, req_id: str) -> None:
        """Nothing to do."""


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt after its prefill: what every arm starts from.

    Attributes:
        cache: K and V of the prompt.
        mass: ``[window, num_prompt]`` attention mass of the last queries.
    """

    cache: DynamicCache
    mass: NDArray[np.float32]


class Model:
    """The reference model with an explicit mask of hidden tokens."""

    def __init__(self, path: str, layers: tuple[int, ...] | None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layers = layers or default_layers(self._model.config.num_hidden_layers)

    @torch.inference_mode()
    def forward(
        self, tokens: list[int], cache: DynamicCache, hidden: BoolArray, *, observe: bool = True
    ) -> tuple[torch.Tensor, NDArray[np.float32]]:
        """Log-probabilities ``[arms, n, vocabulary]`` and mass ``[arms, n, past + n]``.

        Args:
            tokens: ``[n]`` new tokens, the same in every arm; appended to ``cache``.
            cache: of all earlier tokens, hidden ones included, per arm.
            hidden: ``[arms, past]`` earlier tokens that cannot be read.
            observe: compute the mass (otherwise zeros).
        """
        n, (arms, past) = len(tokens), hidden.shape
        visible = torch.ones(arms, n, past + n, dtype=torch.bool).tril(past)
        visible[:, :, :past] &= ~torch.from_numpy(hidden)[:, None]
        lowest = torch.finfo(torch.float32).min
        out = self._model(
            torch.tensor([tokens]).expand(arms, n),
            attention_mask=torch.zeros(visible.shape).masked_fill(~visible, lowest)[:, None],
            position_ids=torch.arange(past, past + n)[None],
            past_key_values=cache,
            output_attentions=observe,
        )
        mass = np.zeros((arms, n, past + n), np.float32)
        if observe:
            mass = torch.stack([out.attentions[i].mean(1) for i in self.layers]).mean(0).numpy()
        return out.logits.log_softmax(-1), mass

    def prefill(self, prompt: list[int], window: int) -> Prefilled:
        """Run a prompt; nothing is hidden from its tokens."""
        cache = DynamicCache()
        head = prompt[:-window]
        self.forward(head, cache, np.zeros((1, 0), np.bool_), observe=False)
        _, mass = self.forward(prompt[-window:], cache, np.zeros((1, len(head)), np.bool_))
        return Prefilled(cache, mass[0])

    def cache_signals(
        self, cache: DynamicCache, arm: int, live: IdArray
    ) -> dict[str, NDArray[np.float32]]:
        """Signals computed from K and V of the sampled layers."""
        totals: dict[str, Any] = defaultdict(float)
        for i in self.layers:
            layer = cache.layers[i]
            key, value = layer.keys[arm][:, live], layer.values[arm][:, live]
            totals["key_norm"] += key_norms(key)
            totals["key_redundancy"] += key_redundancy(key)
            totals["value_key_ratio"] += value_key_ratio(key, value)
        return {name: (total / len(self.layers)).numpy() for name, total in totals.items()}


class Arm:
    """One text under one policy, from the end of its prefill on.

    Attributes:
        hidden: ``[num_tokens]`` evicted tokens.
    """

    def __init__(self, config: VTokenConfig, mass: NDArray[np.float32]) -> None:
        """Start with the prompt and the mass ``[window, num_prompt]`` of its last queries."""
        self._layer = TokenLayer(config, EndlessPool())
        self._layer.evictor.listener = self._hide
        self._num = mass.shape[1]
        self._kv: RequestKV = self._layer.admit("r", self._num, self._num, 0)
        self._layer.schedule_tokens(self._kv, 0, self._num)
        self.hidden = np.zeros(self._num, np.bool_)
        self._sum = np.zeros(self._num, np.float32)
        self._last = np.zeros(self._num, np.float32)
        self._history = np.zeros(self._num, np.uint64)
        for j, row in enumerate(mass):
            self._observe(row, self._num - len(mass) + j + 1)
        self._prefill = self._sum.copy()

    def grow(self, mass: NDArray[np.float32]) -> None:
        """Tokens were decoded one by one, with the mass ``[n, total]`` of their queries."""
        before, self._num = self._num, mass.shape[1]
        self._layer.schedule_tokens(self._kv, before, self._num)
        for name in ("hidden", "_sum", "_prefill", "_last", "_history"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(len(mass), array.dtype)]))
        for length, row in enumerate(mass, before + 1):
            if self._layer.to_observe(self._kv, length - 1, length) is not None:
                self._observe(row, length)

    def evict(self, model: Model, cache: DynamicCache, arm: int) -> None:
        """Let the token layer evict if it is due; ``arm`` is this arm's place in the cache."""
        live = self._kv.table.live_ids()
        values: dict[str, Any] = {
            "attention_sum": self._sum[live],
            "attention_prefill": self._prefill[live],
            "attention_last": self._last[live],
            "attention_history": self._history[live],
        }
        if self._layer.evictor.policy.signals & CACHE_SIGNALS:
            values |= model.cache_signals(cache, arm, live)
        self._layer.evict_if_due(self._kv, self._num, RequestSignals(live, len(live), values))

    def _observe(self, mass: NDArray[np.float32], length: int) -> None:
        """One query at the end of ``length`` tokens has looked."""
        num_live = length - int(self.hidden[:length].sum())
        self._sum[: len(mass)] += mass
        self._last[: len(mass)] = mass
        hit = (mass > 1.0 / num_live).astype(np.uint64)
        self._history[: len(mass)] = (self._history[: len(mass)] << np.uint64(1)) | hit

    def _hide(self, kv: RequestKV, num_tokens: int, victims: IdArray) -> None:
        self.hidden[victims] = True


def run_case(model: Model, case: Case, configs: list[VTokenConfig]) -> NDArray[np.float32]:
    """Negative log-likelihood ``[arms, tokens]`` of the continuation behind its first token."""
    prefilled = model.prefill(case.prompt, VTokenConfig().score_window_tokens)
    cache = prefilled.cache
    cache.batch_repeat_interleave(len(configs))
    arms = [Arm(config, prefilled.mass) for config in configs]
    found = []
    inputs, targets = case.continuation[:-1], case.continuation[1:]
    for start in range(0, len(inputs), INTERVAL):
        for i, arm in enumerate(arms):
            arm.evict(model, cache, i)
        part = slice(start, start + INTERVAL)
        hidden = np.stack([arm.hidden for arm in arms])
        logprobs, mass = model.forward(inputs[part], cache, hidden)
        expected = torch.tensor(targets[part])[None, :, None].expand(len(arms), -1, 1)
        found.append(-logprobs.gather(2, expected)[:, :, 0].numpy())
        for arm, rows in zip(arms, mass, strict=True):
            arm.grow(rows)
    return np.concatenate(found, axis=1)


def make_arms(policies: list[str], **overrides: Any) -> Iterator[tuple[str, float, VTokenConfig]]:
    """Full attention once, then every policy at every ratio."""
    yield "none", 1.0, VTokenConfig(mode="naive", policy="none")
    for policy in policies:
        for ratio in KEEP_RATIOS:
            config = {"mode": "naive", "policy": policy, "keep_ratio": ratio, **overrides}
            yield policy, ratio, VTokenConfig.from_dict(config)


def measure(
    model: Model,
    cases: list[Case],
    arms: list[tuple[str, float, VTokenConfig]],
    results: Losses,
    settings: dict[str, Any],
) -> None:
    """Run every case in every arm."""
    for number, case in enumerate(cases):
        start = time.monotonic()
        losses = run_case(model, case, [config for _, _, config in arms])[:, case.skip :]
        for (policy, ratio, _), row in zip(arms, losses, strict=True):
            results.add((case.task, policy, ratio), row)
        results.write(settings)
        print(f"{number + 1}/{len(cases)} {case.task} {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    """Measure everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default=",".join(p for p in POLICIES if POLICIES[p].evicts))
    parser.add_argument("--tasks", default="text,copy,lookup,lookup_later")
    parser.add_argument("--repeats", type=int, default=4, help="cases per task and text source")
    parser.add_argument("--cases", type=int, help="only the first so many, in shuffled order")
    parser.add_argument("--resume", action="store_true", help="add to what --out holds already")
    parser.add_argument("--update", action="store_true", help="keep other policies' rows of --out")
    parser.add_argument("--layers", default="", help="sampled layers; default as the engine")
    parser.add_argument("--interval", type=int, default=8, help="score_interval_steps")
    parser.add_argument("--threads", type=int, default=0, help="of torch; default: its own")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    layers = tuple(map(int, args.layers.split(","))) if args.layers else None
    model = Model(str(ensure_embedded_model()), layers)
    rng = random.Random(0)
    cases = make_cases(model.tokenizer, args.tasks.split(","), args.repeats, rng)
    rng.shuffle(cases)  # what is there after an interruption covers every task
    arms = list(make_arms(args.policies.split(","), score_interval_steps=args.interval))
    settings = {"layers": model.layers, "score_interval_steps": args.interval}
    results = Losses(args.out, "policy")
    done = results.resume(settings) if args.resume or args.update else 0
    if args.update:
        results.drop({policy for policy, _, _ in arms})
        done = 0
    measure(model, cases[done : args.cases], arms, results, settings)


if __name__ == "__main__":
    main()
