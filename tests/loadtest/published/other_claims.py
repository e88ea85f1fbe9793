"""Figures of the text of docs/performance.md, docs/policies.md and README.md: see ``claims.py``.

Most figures of these pages' text are of benchmarks without a result of arms and comparisons, so
only what is listed here is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kvpress_table import difference
from tests.loadtest.published.cells import Cell
from tests.loadtest.published.computed import Claim, ends_in_per_cent, span, value
from tests.loadtest.published.numbers import number
from tests.loadtest.published.policies import ours_beside_presses, presses
from tests.loadtest.published.results import Result


def _at(*path: str | int) -> Callable[[Result], Any]:
    def found(result: Result) -> Any:
        data: Any = result.data
        for part in path:
            data = data[part]
        return data

    return found


def _less(ours: Callable[[Result], float], theirs: Callable[[Result], float]) -> Cell:
    """Per cent."""
    return value(lambda result: 100 * (1 - ours(result) / theirs(result)))


def _more(ours: Callable[[Result], float], theirs: Callable[[Result], float]) -> Cell:
    return value(lambda result: 100 * (ours(result) / theirs(result) - 1))


def _steps(arms: Sequence[str], *path: str | int) -> Callable[[Result], list[float]]:
    """A figure of these arms at both contexts."""
    return lambda result: [
        _at(context, arm, *path)(result) for context in ("512", "1500") for arm in arms
    ]


def _above_stock(result: Result) -> list[float]:
    ratios = _steps(["naive none"], "step_ratio_to_stock", 1)(result)
    return [100 * (ratio - 1) for ratio in ratios]


def _large(
    statistic: str, part: str = "total", version: str = "after"
) -> Callable[[Result], float]:
    """Milliseconds of a step's bookkeeping, or of a part of it, at 512 requests of 16K."""

    def found(result: Result) -> float:
        case = {"num_requests": 512, "num_tokens": 16384}
        (entry,) = (e for e in result.data[version] if case.items() <= e["case"].items())
        milliseconds: float = entry["milliseconds"][part][statistic]
        return milliseconds

    return found


def _other(name: str, statistic: str) -> Callable[[Result], float]:
    return _at("other", name, "after", 0, "milliseconds", "total", statistic)


_ALL_ARMS = ("naive none", "naive random 50 %", "lazy random 50 %")
_LAZY = ["lazy random 50 %"]
_MEAN = "mean_milliseconds"
_BURSTS = ("plan", "settle")

_INDIRECTION_AT_1500 = value(lambda result: _above_stock(result)[1])

README = [
    Claim(
        "overhead",
        "[{} to {} % of the time per token at 512 tokens",
        ends_in_per_cent("mean_tpot_ms", "indirection@512", "stock@512"),
    ),
    Claim("step_time", "[{} % of a step at 1500", [_INDIRECTION_AT_1500]),
]

STEP_ALONE = Claim("step_time", "Alone, [that is {} % at 1500", [_INDIRECTION_AT_1500])
"""Of docs/evaluation.md."""

PERFORMANCE = [
    Claim("step_time", "the indirection costs {} to {} % of a step", span(_above_stock)),
    Claim(
        "step_time",
        "{} to {} ms in the scheduler and {} to {} ms in the worker, of {} to {} ms",
        [
            *span(_steps(_ALL_ARMS, _MEAN, "scheduler_overhead_seconds"), 2),
            *span(_steps(_ALL_ARMS, _MEAN, "worker_overhead_seconds"), 1),
            *span(_steps(_ALL_ARMS, "step_milliseconds", 1)),
        ],
    ),
    Claim(
        "step_time",
        "took {} to {} ms in the mean, and a forward waited {} to {} ms for a batch",
        [
            *span(_steps(_LAZY, _MEAN, "relocation_copy_seconds")),
            *span(_steps(_LAZY, _MEAN, "relocation_stall_seconds")),
        ],
    ),
    Claim("step_time", "there were {} and {} plans", span(_steps(_LAZY, "committed"))),
    Claim(
        "step_time",
        "{} ms in the arm without eviction",
        [value(_at("512", "naive none", _MEAN, "scheduler_overhead_seconds"), 2)],
    ),
    Claim(
        "bookkeeping",
        "took {} ms in the median at 512 × 16K",
        [value(_large("median", version="before"), 1)],
    ),
    Claim("bookkeeping", "in the median step: {} ms", [value(_large("median"), 2)]),
    Claim(
        "bookkeeping",
        "it is {} ms. The mean is {} ms",
        [value(_other("vllm", "median"), 2), value(_large("mean"), 1)],
    ),
    Claim(
        "bookkeeping",
        "cost {} ms of it",
        [value(lambda result: sum(_large("mean", part)(result) for part in _BURSTS), 1)],
    ),
    Claim("bookkeeping", "=64` the median is {} ms", [value(_other("i64", "median"), 2)]),
    Claim(
        "bookkeeping",
        "takes {} ms, registering the new tokens of all 512 requests {}, "
        "the policy's draw {}, rows {}",
        [value(_large("median", part), 2) for part in ("evict", "sync", "policy", "rows")],
    ),
    Claim("bookkeeping", "p99 {} ms.", [value(_other("aligned", "p99"))]),
    Claim(
        "adaptive_threshold",
        "{} % and {} % fewer copied tokens",
        [
            _less(_at(load, "adaptive", "moved_tokens"), _at(load, "fixed 0.05", "moved_tokens"))
            for load in ("tuned", "held_out")
        ],
    ),
]


def _per_token(task: str, press: str, policy: str, keep: float) -> str:
    """How much better the press is."""
    found = difference(presses()[task, press, keep], ours_beside_presses()[task, policy, keep])
    return found.lstrip("−+")


def _nll(rows: str, name: str) -> Cell:
    def cell(_: Result, __: str) -> str:
        found = presses() if rows == "press" else ours_beside_presses()
        return number(found["copy", name, 0.25]["nll"], 2)

    return cell


def _cost(policy: int, *path: str | int) -> Callable[[Result], float]:
    return _at("policies", policy, *path)


POLICIES = [
    Claim(
        "score_cost",
        "takes {} times as long as one under `streaming_llm`",
        [value(_cost(1, "wall_ratio_median"), 3)],
    ),
    Claim("score_cost", "under `snapkv` {}.", [value(_cost(2, "wall_ratio_median"), 3)]),
    Claim(
        "score_cost",
        "from {} to {} for `h2o` and from {} to {} for `snapkv`",
        [
            value(_cost(1, "wall_ratio_range", 0), 3),
            value(_cost(1, "wall_ratio_range", 1), 1),
            value(_cost(2, "wall_ratio_range", 0), 2),
            value(_cost(2, "wall_ratio_range", 1), 2),
        ],
    ),
    Claim(
        "block_cap",
        "it copies {} % less than that at waits that are longer (by {} and {} %)",
        [
            _less(*(_at("held_out", arm, "moved_tokens") for arm in ("cap 24", "fixed 0.05"))),
            _more(*(_at("held_out", arm, "mean_wait_steps") for arm in ("cap 24", "fixed 0.05"))),
            _more(*(_at("tuned", arm, "mean_wait_steps") for arm in ("cap 20", "fixed 0.05"))),
        ],
    ),
    Claim(
        "kvpress_quality",
        "SnapKVPress copies at {} where `snapkv` is at {} and looks up {} better",
        [
            _nll("press", "snapkv"),
            _nll("policy", "snapkv"),
            lambda _, __: _per_token("lookup", "snapkv", "snapkv", 0.25),
        ],
    ),
    Claim(
        "kvpress_quality",
        "`snapkv` is behind by {} on copy and ahead by {} on lookup",
        [
            lambda _, __: _per_token("copy", "snapkv", "snapkv", 0.5),
            lambda _, __: _per_token("lookup", "snapkv", "snapkv", 0.5),
        ],
    ),
]
