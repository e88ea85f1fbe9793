"""Tables of docs/evaluation.md about blocks: what is held, wasted, copied, and how much fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.loadtest.published.cells import Cell, joined, marked, mean, of, percent, plain, ratio
from tests.loadtest.published.numbers import number
from tests.loadtest.published.results import Result
from tests.loadtest.published.tables import Column, Row, Table

RETAINED = "retained_blocks_per_request"

WASTE = Table(
    name="waste",
    source="waste",
    labels=["policy"],
    columns=[
        Column("F", mean("waste_ratio", 2)),
        Column("blocks at most half full", percent("low_utilization_block_ratio")),
        Column("blocks held over needed, decoding", mean("retained_over_ideal", 2)),
        Column(
            "held / needed at the end",
            joined(" / ", plain("end_retained_blocks", 1), plain("end_ideal_blocks", 1)),
        ),
    ],
    rows=[
        Row(["`random`"], "document/random"),
        Row(["`h2o`"], "document/h2o"),
        Row(["`streaming_llm`"], "document/streaming_llm"),
        Row(["paper, scattered policies"], cells=["0.40 … 0.60", "56 … 67 %", "", ""]),
    ],
)


def paired(workload: str) -> Table:
    """Blocks held in ``naive`` and ``lazy``, and by the rivals."""
    return Table(
        name=f"paired, {workload}",
        source="paired",
        labels=["policy", "mode"],
        columns=[
            Column("blocks per request", mean(RETAINED, 1)),
            Column("utilisation", percent("utilization")),
            Column("blocks at most half full", percent("low_utilization_block_ratio")),
            Column("held at the end", plain("end_retained_blocks", 1)),
            Column("needed", plain("end_ideal_blocks", 1)),
            Column("tokens copied", plain("relocated_tokens", nearest=10)),
        ],
        rows=[
            Row(["`h2o`", "naive"], f"{workload}/h2o/naive"),
            Row(["`h2o`", "lazy"], f"{workload}/h2o/lazy"),
            Row(["`random`", "naive"], f"{workload}/random/naive"),
            Row(["`random`", "lazy"], f"{workload}/random/lazy"),
            Row(["`paged_eviction`", "naive"], f"{workload}/paged_eviction/naive"),
            Row(["zipage, `h2o`", "lazy"], f"{workload}/zipage"),
        ],
    )


def saved(policy: str) -> Cell:
    """What ``lazy`` holds less than ``naive``; the key is the workload."""

    def cell(result: Result, key: str) -> str:
        found = result.ratio(RETAINED, f"{key}/{policy}/lazy", f"{key}/{policy}/naive")
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        less, high, low = (number(100 * (x - 1), 1) for x in (found.value, found.high, found.low))
        return f"{less} % ({high} … {low})"

    return cell


def gained(result: Result, key: str) -> str:
    """Points of utilisation under ``h2o`` and ``random``; the key is the workload."""

    def points(policy: str) -> str:
        lazy, naive = (
            result.mean(f"{key}/{policy}/{mode}", "utilization") for mode in ("lazy", "naive")
        )
        assert lazy is not None
        assert naive is not None
        return f"+{number(100 * (lazy.value - naive.value), 1)}"

    return f"{points('h2o')} and {points('random')} points"


def half_full(result: Result, key: str) -> str:
    """Share of blocks that ``naive`` leaves at most half full; the key is the workload."""
    metric = "low_utilization_block_ratio"
    shares = (
        plain(metric, arm=f"{key}/{policy}/naive", scale=100)(result, "")
        for policy in ("h2o", "random")
    )
    return f"{' and '.join(shares)} %"


def _of_workload(cell: Cell, workload: str) -> Cell:
    return lambda result, _: cell(result, workload)


def _by_workload(label: str, cell: Cell, paper: str) -> Row:
    cells = [_of_workload(cell, workload) for workload in ("document", "conversation")]
    return Row([label], cells=[*cells, paper])


PAIRED_RATIOS = Table(
    name="paired, lazy against naive",
    source="paired",
    labels=["lazy against naive"],
    columns=[Column(head) for head in ("document", "conversation", "paper")],
    rows=[
        _by_workload("retained blocks, `h2o`", saved("h2o"), "−27.2 … −72.3 % over policies"),
        _by_workload("retained blocks, `random`", saved("random"), ""),
        _by_workload("utilisation", gained, "+21.7 and +21.9 points"),
        _by_workload("blocks at most half full, naive", half_full, "56–67 %, `random` worst"),
    ],
)

ARMS = {
    "native": "native (mode `off`)",
    "native, fp8": "native, fp8 cache",
    "random/naive": "`random`, naive",
    "random/lazy": "`random`, lazy",
    "paged_eviction": "`paged_eviction`",
    "zipage": "zipage, `random`",
}
"""Labels of the arms of ``frontier``."""

POOLS = {"200": "tight, 200", "425": "roomy, 425"}

FRONTIER = Table(
    name="frontier",
    source="frontier",
    labels=["blocks", "arm"],
    columns=[
        Column("running while others wait", mean("running", 1)),
        Column("blocks per running request", mean("blocks_per_running_request", 1)),
        Column("engine steps", mean("steps")),
        Column("output tokens per step", mean("output_tokens_per_step", 1)),
        Column("preemptions", mean("preemptions")),
        Column("tokens copied", plain("relocated_tokens", nearest=100, missing="–")),
    ],
    rows=[
        Row([label, arm], f"{name}@{pool}")
        for pool, label in POOLS.items()
        for name, arm in ARMS.items()
        if name != "native, fp8"
    ],
)

_PAPER = {"200": "5 → 8 requests", "425": "11 → 22 requests"}

FRONTIER_RATIOS = Table(
    name="frontier, lazy against others",
    source="frontier",
    labels=["lazy against", ""],
    columns=[
        Column("running at once"),
        Column("output tokens per step"),
        Column("blocks per running request"),
        Column("paper"),
    ],
    rows=[
        Row(
            [label, POOLS[pool].partition(",")[0]],
            cells=[
                *(
                    ratio(metric, f"{name}@{pool}", f"random/lazy@{pool}")
                    for metric in (
                        "running",
                        "output_tokens_per_step",
                        "blocks_per_running_request",
                    )
                ),
                _PAPER[pool] if name in ("random/naive", "native") else "",
            ],
        )
        for name, label in (
            ("random/naive", "naive"),
            ("native", "native"),
            ("paged_eviction", "`paged_eviction`"),
            ("zipage", "zipage"),
        )
        for pool in POOLS
    ],
)


def found_in_cache(result: Result, key: str) -> str:
    """In words; the three arms agree. The key is the sharing degree."""
    arms = [f"{mode}@{key}" for mode in ("naive", "lazy", "lazy, shared too")]
    shares = {tuple(result.samples(arm, "prefix_hit_ratio")) for arm in arms}
    assert shares == {(0.5,) * 5}, shares
    return "half, in every arm"


PREFIX = Table(
    name="prefix",
    source="prefix",
    labels=["sharing degree"],
    columns=[
        Column("naive", mean("used_blocks", 1, "naive@{}")),
        Column("lazy", mean("used_blocks", 1, "lazy@{}")),
        Column("lazy / naive", ratio("used_blocks", "naive@{}", "lazy@{}")),
        Column(
            "lazy, `relocate_shared` / naive",
            ratio("used_blocks", "naive@{}", "lazy, shared too@{}"),
        ),
        Column("prompt tokens found in the cache", found_in_cache),
    ],
    rows=[Row([degree], degree) for degree in ("1", "4")],
    align="rrrrrr",
)


@dataclass(frozen=True)
class Sweep:
    """One row of :func:`clients`.

    Attributes:
        label: of the row.
        source: name of the JSON; its arms are ``random/lazy, sweep@POOL`` and so on.
        pool: blocks.
        paper: what the paper has, in words.
    """

    label: str
    source: str
    pool: int
    paper: str


def clients(name: str, sweeps: Sequence[Sweep]) -> Table:
    """The highest number of clients that a pool bears; – where an arm was not swept."""
    arms = ("native", "random/naive", "random/lazy", "paged_eviction")

    def highest(arm: str) -> Cell:
        shown = mean("highest_feasible", arm=arm)
        return lambda result, key: shown(result, key) if arm in result.data["arms"] else "–"

    def row(sweep: Sweep) -> Row:
        cells = [of(sweep.source, highest(f"{arm}, sweep@{sweep.pool}")) for arm in arms]
        cells[2] = marked(cells[2])
        return Row([sweep.label], cells=[*cells, sweep.paper])

    heads = ("native", "`random`, naive", "`random`, lazy", "`paged_eviction`", "paper")
    columns = [Column(head) for head in heads]
    return Table(name, "", [""], columns, [row(sweep) for sweep in sweeps])


TABLES = [
    WASTE,
    paired("document"),
    paired("conversation"),
    PAIRED_RATIOS,
    FRONTIER,
    FRONTIER_RATIOS,
    clients(
        "frontier, clients",
        [Sweep("highest number of clients", "frontier_sweep", 200, "5, 5 and 8")],
    ),
    PREFIX,
]
