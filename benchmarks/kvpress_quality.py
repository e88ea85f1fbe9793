"""NVIDIA's kvpress on the cases of :mod:`benchmarks.policy_quality`, as a second opinion.

kvpress 0.5.5 wants an older transformers than vLLM, so it gets an environment of its own, which
needs nothing else of this repository's requirements:

    python3.11 -m venv kvpress-env
    kvpress-env/bin/pip install kvpress==0.5.5 transformers==5.2.0 torch==2.13.0 'datasets<4.5'
    kvpress-env/bin/python -m benchmarks.kvpress_quality --model FOLDER --repeats 6 \\
        --out docs/evaluation/kvpress_quality.json

FOLDER is what ``service.embedded_model.ensure_embedded_model`` returns in the service's
environment. Use the same Python version there and here: the texts are those of its library.
The file is written after every case, so a run may be ended at any time.

Cases, their order, teacher forcing, logical positions and float32 are those of ours. A press
compresses the prompt once, at the end of its prefill, and keeps every later token; most choose
per layer and head. ``benchmarks.kvpress_table`` puts the results beside ours.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_results import Losses
from benchmarks.quality_tasks import Case, make_cases

KEEP_RATIOS = (0.75, 0.5, 0.25)
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "streaming_llm": lambda kvpress, ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "random": lambda kvpress, ratio: kvpress.RandomPress(ratio, seed=0),
    "knorm": lambda kvpress, ratio: kvpress.KnormPress(ratio),
    "snapkv": lambda kvpress, ratio: kvpress.SnapKVPress(ratio, window_size=16, kernel_size=7),
    "tova": lambda kvpress, ratio: kvpress.TOVAPress(ratio),
    "observed_attention": lambda kvpress, ratio: kvpress.ObservedAttentionPress(ratio),
    "expected_attention": lambda kvpress, ratio: kvpress.ExpectedAttentionPress(ratio),
}
"""Press by name, from the module and the ratio to *remove*; ``snapkv`` has our window and pool."""


def make_tee(kvpress: Any, presses: Sequence[Any]) -> Any:
    """A press that compresses nothing and keeps what each of ``presses`` would leave.

    A press changes a layer's cache behind its attention, so what later layers see is the same for
    all of them: one prefill serves all.

    Returns:
        A press whose ``kept[i][layer]`` are the keys and values that ``presses[i]`` leaves.
    """

    class Tee(kvpress.BasePress):  # type: ignore[misc]
        kept: tuple[dict[int, Any], ...] = tuple({} for _ in presses)

        def compress(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> tuple[Any, Any]:
            for kept, press in zip(self.kept, presses, strict=True):
                kept[module.layer_idx] = press.compress(
                    module, hidden, keys, values, attentions, kwargs
                )
            return keys, values

    return Tee()


@torch.inference_mode()
def run_case(model: Any, kvpress: Any, presses: Sequence[Any], case: Case) -> torch.Tensor:
    """Negative log-likelihood of the scored tokens of a continuation.

    Returns:
        ``[1 + presses, tokens]``: with the whole prompt, then with what each press leaves of it.
    """
    from transformers import DynamicCache

    tee, cache, length = make_tee(kvpress, presses), DynamicCache(), len(case.prompt)
    with tee(model):
        model(torch.tensor([case.prompt]), past_key_values=cache)
    whole = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}
    inputs, targets = case.continuation[:-1], torch.tensor(case.continuation[1:])
    losses = []
    for kept in (whole, *tee.kept):
        cache = DynamicCache()
        for layer, (keys, values) in sorted(kept.items()):
            cache.update(keys.clone(), values.clone(), layer)
        out = model(
            torch.tensor([inputs]),
            past_key_values=cache,
            position_ids=torch.arange(length, length + len(inputs))[None],
            cache_position=torch.arange(len(inputs)) + cache.get_seq_length(),
        )
        logprobs = out.logits[0].log_softmax(-1)
        losses.append(-logprobs.gather(1, targets[:, None])[case.skip :, 0])
    return torch.stack(losses)


class Results(Losses):
    """Losses per task, press and ratio, in a file as :mod:`benchmarks.policy_quality` writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "press")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """What to measure, and where to write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the embedded model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--presses", default=",".join(PRESSES))
    parser.add_argument("--tasks", default="text,copy,lookup,lookup_later", help="as ours had them")
    parser.add_argument("--repeats", type=int, default=6, help="as ours had them")
    parser.add_argument("--cases", type=int, help="only the first so many, in shuffled order")
    return parser.parse_args(argv)


def main() -> None:
    """Measure every press and write one JSON file."""
    args = parse_args()
    kvpress, transformers = map(importlib.import_module, ("kvpress", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = random.Random(0)
    cases = make_cases(tokenizer, args.tasks.split(","), args.repeats, rng)
    rng.shuffle(cases)
    arms = [(name, keep) for name in args.presses.split(",") for keep in KEEP_RATIOS]
    presses = [PRESSES[name](kvpress, 1 - keep) for name, keep in arms]
    for press in presses:
        press.post_init_from_model(model)
    settings = {p: importlib.metadata.version(p) for p in ("kvpress", "transformers", "torch")}
    results = Results(args.out)
    for number, case in enumerate(cases[: args.cases]):
        start = time.monotonic()
        losses = run_case(model, kvpress, presses, case)
        for arm, row in zip([("none", 1.0), *arms], losses, strict=True):
            results.add((case.task, *arm), row.double())
        results.write(settings)
        print(f"{number + 1}/{len(cases)} {case.task} {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
