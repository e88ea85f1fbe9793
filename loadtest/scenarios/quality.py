"""What eviction does to answers, and that repacking does nothing to them (paper §4.6).

*Identity*: the same generations in ``naive`` and ``lazy``, one at a time so that batches are equal;
tokens and logprobs must be equal to the last bit.

*Damage*: each policy against full attention (policy ``none``) on the same service. Texts are
teacher-forced as prompts that are computed in chunks, with an eviction after each chunk; the
distributions of later chunks are compared. Then verbatim copying, looking up a value, a fact
hidden in a document, and a free continuation.
"""

from __future__ import annotations

from typing import Any

from loadtest.bench import Bench
from loadtest.fleet import Arm
from loadtest.outcome import Outcome
from loadtest.scenarios.capacity import RECLAIM_EAGERLY
from loadtest.scenarios.inputs import long_text, make_jobs, sources
from loadtest.scenarios.quality_parts import SIZES, Damage, Size
from loadtest.workloads import Job, Lengths

PAPER = "ROUGE-L of vToken and naive differs by −0.0016 in the mean over 144 generations"
PLOTS = (
    {"metric": "kl_top20", "title": "KL from full attention, nats", "x": "keep ratio"},
    {"metric": "copy_match", "title": "Verbatim copy, share of tokens", "x": "keep ratio"},
)


async def run(bench: Bench) -> Outcome:
    """Measure identity, then damage."""
    size = bench.sized(SIZES)
    outcome = bench.begin(Outcome(config=_describe(size), details={"paper": PAPER}))
    for policy in size.identity_policies:
        await _identity(bench, size, outcome, policy)
    await bench.fleet.release()
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
        client = await bench.tokenizer(arm)
        lengths = Lengths(size.num_generations, size.identity_prompt, size.identity_output)
        jobs = await make_jobs(size.identity_workload, client, lengths, 0)
        answers[mode] = [await _generate(client, job) for job in jobs]
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
    outcome.details[f"identity/{policy}"] = {"freed_blocks_lazy": moved, "freed_blocks_naive": kept}


async def _generate(client: Any, job: Job) -> dict[str, Any]:
    body = {**job.body(), "ignore_eos": False, "logprobs": 5, "return_token_ids": True}
    return dict(await client.complete(**body, vllm_xargs={"vtoken_receipt": True}))


async def _damage(bench: Bench, size: Size, outcome: Outcome) -> None:
    arm = Arm("damage", "naive", {}, size.engine)
    damage = await Damage.prepare(await bench.tokenizer(arm), size)
    for policy, keep_ratio in (("full", 1.0), *size.cells()):
        document: dict[str, Any] = {"recent_tokens": 16, "score_window_tokens": 16}
        if policy == "full":
            document["policy"] = "none"
        else:
            document |= {"policy": policy, "keep_ratio": keep_ratio}
        for metrics in await damage.measure(bench.fleet, arm, document):
            outcome.add(f"{policy}@{keep_ratio:g}", metrics)


def _describe(size: Size) -> dict[str, Any]:
    return {
        "identity": {
            "policies": list(size.identity_policies),
            "generations": size.num_generations,
            "workload": sources((size.identity_workload,)),
            "prompt_tokens": size.identity_prompt,
            "output_tokens": size.identity_output,
        },
        "damage": {
            "policies": list(size.policies),
            "keep_ratios": list(size.keep_ratios),
            "text": long_text().source,
            "cases_per_task": size.num_cases,
            "prompt_tokens": size.num_prompt_tokens,
            "scored_from_token": size.scored_from,
            "engine": size.engine.arguments("naive"),
        },
    }
