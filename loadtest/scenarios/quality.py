"""What eviction does to answers, and that repacking does nothing to them (paper §4.6).

*Identity*: the same generations in ``naive`` and ``lazy``, one at a time so that batches are equal;
tokens and logprobs must be equal to the last bit.

*Damage*: each policy against full attention (policy ``none``) on the same service. A context is
computed, cut to the keep ratio, and what follows is teacher-forced: running text; or a list that is
copied, values that are looked up, facts that were hidden (unless text alone is asked for). The
text's context is also continued freely, with evictions as it grows. Full attention is asked twice:
its row is how far apart two answers to the same question are. Stock vLLM is asked with the model's
own type and with an fp8 cache: what halving the bytes of each token does, beside dropping tokens.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from loadtest.bench import Bench
from loadtest.fleet import Arm
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import RECLAIM_EAGERLY
from loadtest.scenarios.inputs import long_text, make_jobs, sources
from loadtest.scenarios.quality_parts import EXACT_FROM, FULL, SIZES, Cell, Size, ask, distances
from loadtest.scenarios.quality_tasks import make_cases
from loadtest.scenarios.rivals import make_fp8_arm
from loadtest.workloads import Job, Lengths

PAPER = "ROUGE-L of vToken and naive differs by −0.0016 in the mean over 144 generations"
PLOTS = (
    {"metric": "kl_top20", "title": "KL from full attention, nats", "x": "keep ratio"},
    {"metric": "copy_nll_above_full", "title": "Verbatim copy, nats lost", "x": "keep ratio"},
    {"metric": "lookup_nll_above_full", "title": "Lookup, nats lost", "x": "keep ratio"},
)

logger = logging.getLogger(__name__)


async def run(bench: Bench) -> Outcome:
    """Measure identity, then damage."""
    size = bench.sized(SIZES)
    outcome = bench.begin(Outcome(config=_describe(size), details={"paper": PAPER}))
    for policy in size.identity_policies:
        await _identity(bench, size, outcome, policy)
    await bench.fleet.release()
    if size.policies:
        await _damage(bench, size, outcome)
    outcome.not_measured.append(
        "Answers of models above 135M parameters; judgements by people; long answers."
    )
    return outcome


async def _identity(bench: Bench, size: Size, outcome: Outcome, policy: str) -> None:
    document = {
        "policy": policy,
        "keep_ratio": 0.5,
        "recent_tokens": 16,
        "theta_f": 0.05,
        **RECLAIM_EAGERLY,
    }
    answers: dict[str, list[dict[str, Any]]] = {}
    for mode in ("naive", "lazy"):
        arm = Arm(f"identity/{policy}/{mode}", mode, document)
        client = await bench.fleet.client(arm)
        lengths = Lengths(size.num_generations, size.identity_prompt, size.identity_output)
        jobs = await make_jobs(size.identity_workload, client, lengths, 0)
        started = time.monotonic()
        answers[mode] = [await _generate(client, job) for job in jobs]
        logger.info("%s: %.0f s, %d answers", arm.name, time.monotonic() - started, len(jobs))
    moved = sum(a["vtoken"]["freed_blocks"] for a in answers["lazy"])
    kept = sum(a["vtoken"]["freed_blocks"] for a in answers["naive"])
    for ours, theirs in zip(answers["lazy"], answers["naive"], strict=True):
        a, b = ours["choices"][0], theirs["choices"][0]
        outcome.add(
            f"identity/{policy}",
            {
                "same_tokens": a["token_ids"] == b["token_ids"],
                "same_logprobs": a["logprobs"] == b["logprobs"],
                "tokens": len(a["token_ids"]),
                "length_ratio": len(a["token_ids"]) / len(b["token_ids"]),
                "same_evictions": ours["vtoken"]["evicted_tokens"]
                == theirs["vtoken"]["evicted_tokens"],
                "evicted_tokens": ours["vtoken"]["evicted_tokens"],
            },
        )
    found = outcome.arms[f"identity/{policy}"]
    is_same = zip(found["same_tokens"], found["same_logprobs"], strict=True)
    outcome.details[f"identity/{policy}"] = {
        "generations": len(found["tokens"]),
        "identical": sum(all(pair) for pair in is_same),
        "tokens": sum(found["tokens"]),
        "freed_blocks_lazy": moved,
        "freed_blocks_naive": kept,
    }


async def _generate(client: Any, job: Job) -> dict[str, Any]:
    body = {**job.body(), "ignore_eos": False, "logprobs": 5, "return_token_ids": True}
    return dict(await client.complete(**body, vllm_xargs={"vtoken_receipt": True}))


async def _damage(bench: Bench, size: Size, outcome: Outcome) -> None:
    """Some cases at a time, in every cell: what is there after an error covers all cells."""
    full = size.arm(FULL)
    client = await bench.fleet.service(full)
    cases = await make_cases(
        client,
        long_text(),
        size.num_cases,
        size.num_context,
        size.num_text,
        with_recall=size.with_recall,
    )
    cells = [*size.cells(), *(await _stock_cells(bench, size) if size.with_fp8 else ())]
    for start in range(0, len(cases), size.num_parallel):
        few = cases[start : start + size.num_parallel]
        started = time.monotonic()
        references = await ask(bench.fleet, full, few, size)
        for cell in cells:
            told = await ask(bench.fleet, cell.arm, few, size)
            for case, ours, reference in zip(few, told, references, strict=True):
                outcome.add(cell.name, distances(case, ours, reference, cell.keep_ratio))
        logger.info("%d cases: %.0f s", start + len(few), time.monotonic() - started)


async def _stock_cells(bench: Bench, size: Size) -> list[Cell]:
    engine = size.engine()
    fp8 = await make_fp8_arm(bench, engine)
    stock = Cell("stock", Arm("stock", "off", {}, engine))
    return [stock, Cell("stock, fp8", fp8)] if fp8 else [stock]


def _describe(size: Size) -> dict[str, Any]:
    """What was sent to what, of the parts that are measured."""
    found: dict[str, Any] = {}
    if size.identity_policies:
        found["identity"] = {
            "policies": list(size.identity_policies),
            "generations": size.num_generations,
            "workload": sources((size.identity_workload,)),
            "prompt_tokens": size.identity_prompt,
            "output_tokens": size.identity_output,
        }
    if size.policies:
        found["damage"] = {
            "policies": list(size.policies),
            "keep_ratios": list(size.keep_ratios),
            "with_fp8": size.with_fp8,
            "text": long_text().source,
            "cases": size.num_cases,
            "context_tokens": size.num_context,
            "text_tokens": size.num_text,
            "with_recall": size.with_recall,
            "continued_tokens": size.num_continued,
            "exact_match": f"from keep ratio {EXACT_FROM} on",
            "engine": size.engine().arguments("naive"),
        }
    return found
