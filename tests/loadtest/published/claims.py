"""Figures of docs/evaluation.md's running text that stand in no result as they are.

Each is a piece of the text with ``{}`` for what is computed here, and stands on the page as
rendered. A mean or a comparison *with its interval*, of a result which its section links to, needs
no entry: see :mod:`tests.loadtest.published.prose`. A ratio alone does: among all comparisons there
is one for nearly any two digits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published.cells import paired_ratio, plain
from tests.loadtest.published.computed import (
    Claim,
    ends_in_per_cent,
    means,
    per_cent_above,
    ratio_alone,
    samples,
    span,
    value,
)
from tests.loadtest.published.damage_claims import DAMAGE
from tests.loadtest.published.memory import RETAINED
from tests.loadtest.published.other_claims import STEP_ALONE
from tests.loadtest.published.results import Result

THROUGHPUT, TOKEN_MS, FIRST_MS = "output_throughput", "mean_tpot_ms", "mean_ttft_ms"
ARMS_512 = ("indirection", "naive, half kept", "lazy, half kept", "lazy, half kept, synchronous")


def _copied_against_least_waste(result: Result) -> float:
    return result.paired_ratio("relocated_tokens", "theta_f@0.25", "theta_f@0.05").value


MEMORY = [
    Claim(
        "paired",
        "(× {} for documents, × {} for conversations)",
        [
            ratio_alone(RETAINED, f"{workload}/zipage", f"{workload}/h2o/lazy")
            for workload in ("document", "conversation")
        ],
    ),
    Claim(
        "frontier_document",
        "{}, {} and {} against `naive`",
        [
            paired_ratio(THROUGHPUT, f"random/naive@{pool}", f"random/lazy@{pool}")
            for pool in (600, 300, 200)
        ],
    ),
    Claim(
        "frontier_document",
        "`lazy` against it {}, {} and {}",
        [
            paired_ratio(THROUGHPUT, f"paged_eviction@{pool}", f"random/lazy@{pool}")
            for pool in (600, 300, 200)
        ],
    ),
    Claim(
        "frontier_document",
        "runs {} and {} requests where `lazy` runs {} and {} (× {}",
        [
            plain("running", 0, "paged_eviction@300"),
            plain("running", 1, "paged_eviction@200"),
            plain("running", 1, "random/lazy@300"),
            plain("running", 1, "random/lazy@200"),
            ratio_alone("running", "random/lazy@300", "paged_eviction@300"),
        ],
    ),
    Claim(
        "frontier_document",
        "({} % sooner",
        [per_cent_above(FIRST_MS, "random/naive@600", "native@600")],
    ),
    Claim(
        "frontier",
        "{} % more steps",
        [per_cent_above("steps", "random/lazy@200", "paged_eviction@200")],
    ),
    Claim(
        "sensitivity",
        "a keep ratio of 0.7 (× {})",
        [ratio_alone(THROUGHPUT, "keep_ratio@0.7", "keep_ratio@0.5")],
    ),
    Claim(
        "sensitivity",
        "with {} % more blocks",
        [per_cent_above("end_retained_blocks", "theta_f@0.9", "theta_f@0.25")],
    ),
    Claim(
        "sensitivity",
        "hold {} % more than plans of 32 and copy {} % less",
        [
            per_cent_above(metric, "max_source_blocks@2", "max_source_blocks@32")
            for metric in ("end_retained_blocks", "relocated_tokens")
        ],
    ),
    Claim(
        "sensitivity_long",
        "copies {} % of what 0.05 does, for {} % more blocks",
        [
            value(
                lambda result: (
                    100
                    * result.paired_ratio("relocated_tokens", "theta_f@0.25", "theta_f@0.05").value
                )
            ),
            per_cent_above("end_retained_blocks", "theta_f@0.25", "theta_f@0.05"),
        ],
    ),
]


def _limits(result: Result) -> Sequence[float]:
    found: list[float] = result.data["details"]["limits_ms"]["random"]
    return found


def _stalls(result: Result, arm: str) -> list[float]:
    """Batches of copies, by how long a forward waited: first those that made none wait."""
    return list(result.data["details"]["stalls"][arm].values())


def _neighbours(result: Result) -> list[float]:
    """Per cent of throughput that they cost each arm, from the samples of the same repeats."""
    pairs = [(f"{arm}+hog@512", f"{arm}@512") for arm in ("stock", *ARMS_512)]
    return [100 * (1 - result.paired_ratio(THROUGHPUT, *pair).value) for pair in pairs]


def _own_python(result: Result) -> list[float]:
    """Per cent of a step that the token layer takes, scheduler and worker together."""
    arms = [arm["parts"] for name, arm in result.data["arms"].items() if name != "stock"]
    names = ("token layer in the scheduler", "token layer in the worker")
    return [100 * sum(parts[name] for name in names) for parts in arms]


SPEED = [
    Claim("sla", "({} to {} s)", span(_limits, 1, scale=1e-3)),
    Claim(
        "sla",
        "its best, {} to {},",
        span(samples("selected_throughput", ["random/naive"]), 1),
    ),
    Claim(
        "sla",
        "{} % more throughput",
        [per_cent_above(THROUGHPUT, "random/lazy@8", "random/naive@8")],
    ),
    Claim(
        "overhead",
        "costs {} to {} % of the time per token",
        ends_in_per_cent(TOKEN_MS, "indirection@512", "stock@512"),
    ),
    Claim(
        "overhead",
        "({} against {} s in the mean",
        [plain(FIRST_MS, 1, arm, scale=1e-3) for arm in ("indirection@512", "stock@512")],
    ),
    Claim(
        "overhead",
        "a token takes {} to {} % less time with half of the tokens gone and {} to {} % less",
        [
            *ends_in_per_cent(TOKEN_MS, "naive, half kept@512", "indirection@512"),
            *ends_in_per_cent(TOKEN_MS, "lazy, half kept@512", "indirection@512"),
        ],
    ),
    Claim(
        "overhead",
        "{} batches ({} plans, {} tokens) in {} steps",
        [
            plain("copy_batches", arm="lazy, half kept@512"),
            plain("relocations", arm="lazy, half kept@512"),
            plain("relocated_tokens", arm="lazy, half kept@512", nearest=100),
            plain("steps", arm="lazy, half kept@512"),
        ],
    ),
    Claim(
        "overhead",
        "{} of {} batches made no forward wait",
        [
            value(lambda result: _stalls(result, "lazy, half kept@512")[0]),
            value(lambda result: sum(_stalls(result, "lazy, half kept@512"))),
        ],
    ),
    Claim(
        "overhead",
        "{} of {} made a forward wait instead of {}",
        [
            value(lambda result: sum(_stalls(result, "lazy, half kept+hog@512")[1:])),
            value(lambda result: sum(_stalls(result, "lazy, half kept+hog@512"))),
            value(lambda result: sum(_stalls(result, "lazy, half kept@512")[1:])),
        ],
    ),
    Claim(
        "overhead",
        "took {} to {} ms of a step here, and {} to {} ms beside",
        [
            *span(means("mean_scheduler_overhead_ms", [f"{arm}@512" for arm in ARMS_512]), 1),
            *span(means("mean_scheduler_overhead_ms", [f"{arm}+hog@512" for arm in ARMS_512]), 1),
        ],
    ),
    Claim("overhead", "Neighbours cost every arm {} to {} % of its throughput", span(_neighbours)),
    Claim(
        "overhead_short",
        "costs {} % of the throughput ({} to {} %)",
        [
            per_cent_above(THROUGHPUT, "indirection@256", "stock@256"),
            *ends_in_per_cent(THROUGHPUT, "indirection@256", "stock@256"),
        ],
    ),
    Claim(
        "overhead_contexts",
        "first token comes after {} s (ours {}, with nothing evicted)",
        [plain(FIRST_MS, 1, f"{arm}@1024", scale=1e-3) for arm in ("stock", "indirection")],
    ),
    Claim(
        "overhead_contexts",
        "after {} s ({}). So throughput",
        [plain(FIRST_MS, 1, f"{arm}@1500", scale=1e-3) for arm in ("stock", "indirection")],
    ),
    Claim(
        "overhead_contexts",
        "the indirection alone is × {} and × {} of stock's",
        [
            ratio_alone(THROUGHPUT, f"indirection@{tokens}", f"stock@{tokens}")
            for tokens in (1024, 1500)
        ],
    ),
    Claim(
        "overhead_contexts",
        "as much as at 512: {} and {} % of the time per token",
        [
            per_cent_above(TOKEN_MS, f"lazy, half kept@{tokens}", f"indirection@{tokens}")
            for tokens in (1024, 1500)
        ],
    ),
    Claim("step_profile", "Our own Python takes {} to {} % of a step", span(_own_python, 1)),
    Claim(
        "guidellm",
        "it was the same ({} … {} ms)",
        span(lambda result: result.samples("guidellm", "median_ttft_ms")[:3]),
    ),
    Claim(
        "guidellm",
        "({} and {} ms)",
        [
            value(lambda result: sorted(result.samples("guidellm", "median_ttft_ms"))[0]),
            value(lambda result: sorted(result.samples("guidellm", "median_ttft_ms"))[1]),
        ],
    ),
]

QUOTED = (
    "the paper reports × 1.10 to 1.37",
    "An earlier run tried 4, 8 and 12 clients only and found × 1.22",
    "The paper reports × 0.58 … 0.71",
)
"""Of the paper, and of a run whose samples were replaced: there is nothing to compute them from."""

CLAIMS = [*MEMORY, *SPEED, *DAMAGE, STEP_ALONE]
