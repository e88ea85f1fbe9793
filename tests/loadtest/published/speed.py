"""Tables of docs/evaluation.md about time: throughput, latency and what the token layer costs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published.cells import (
    Cell,
    extremes,
    marked,
    mean,
    paired_ratio,
    ratio,
)
from tests.loadtest.published.memory import ARMS as FRONTIER_ARMS
from tests.loadtest.published.numbers import interval, number
from tests.loadtest.published.results import Figure, Result
from tests.loadtest.published.tables import Column, Row, Table

FRONTIER_DOCUMENT = Table(
    name="frontier, real model",
    source="frontier_document",
    labels=["blocks", "arm"],
    columns=[
        Column("output tokens per second", mean("output_throughput", 1)),
        Column("against native"),
        Column("running at once", mean("running", 1)),
        Column("blocks per running request", mean("blocks_per_running_request", 1)),
        Column("engine steps", mean("steps")),
        Column("preemptions", mean("preemptions")),
    ],
    rows=[
        Row(
            [label, arm],
            f"{name}@{pool}",
            instead={1: paired_ratio("output_throughput", f"native@{pool}")}
            | ({2: "all"} if pool == "600" or (name, pool) == ("native, fp8", "300") else {}),
        )
        for pool, label in (
            ("600", "ample, 600"),
            ("300", "middling, 300"),
            ("200", "tight, 200"),
        )
        for name, arm in FRONTIER_ARMS.items()
        if name != "zipage"
    ],
)


def closed_loops(
    name: str, source: str, clients: Sequence[int], *, best: int, policy: str = "random"
) -> Table:
    """Throughput and latency of ``naive`` and ``lazy`` by the number of clients.

    Args:
        name: of the table.
        source: name of the JSON; its arms are ``POLICY/lazy@CLIENTS`` and so on.
        clients: the rows.
        best: where ``lazy`` has its highest throughput, in bold.
        policy: of both.
    """
    naive, lazy = (f"{policy}/{mode}@{{}}" for mode in ("naive", "lazy"))
    tokens = mean("output_throughput", 1, lazy)
    return Table(
        name=name,
        source=source,
        labels=["clients"],
        columns=[
            Column("tokens per second, naive", mean("output_throughput", 1, naive)),
            Column("lazy", tokens),
            Column("p95 latency, naive, s", mean("p95_e2el_ms", 1, naive, scale=1e-3)),
            Column("lazy", mean("p95_e2el_ms", 1, lazy, scale=1e-3)),
            Column("preemptions, naive", extremes("preemptions", naive)),
            Column("lazy", extremes("preemptions", lazy)),
        ],
        rows=[
            Row([str(count)], str(count), instead={1: marked(tokens)} if count == best else {})
            for count in clients
        ],
        align="rrrrrrr",
    )


FIRST = "p99_ttft_ms"


def open_loops(name: str, source: str, rates: Sequence[float], *, policy: str = "random") -> Table:
    """What arrives, what is answered within the limit, and how late, in ``naive`` and ``lazy``.

    Args:
        name: of the table.
        source: name of the JSON; its arms are ``POLICY/lazy open@RATE`` and so on.
        rates: requests per second that arrive, the rows.
        policy: of both.
    """
    naive, lazy = (f"{policy}/{mode} open@{{}}" for mode in ("naive", "lazy"))
    return Table(
        name=name,
        source=source,
        labels=["requests per second"],
        columns=[
            Column("within the limit per second, naive", mean("request_goodput", 2, naive)),
            Column("lazy", mean("request_goodput", 2, lazy)),
            Column("lazy / naive", ratio("request_goodput", naive, lazy)),
            Column("p95 latency, naive, s", mean("p95_e2el_ms", 1, naive, scale=1e-3)),
            Column("lazy", mean("p95_e2el_ms", 1, lazy, scale=1e-3)),
            Column("lazy / naive", ratio("p95_e2el_ms", naive, lazy)),
            Column("p99 of the first token, naive, s", mean(FIRST, 1, naive, scale=1e-3)),
            Column("lazy", mean(FIRST, 1, lazy, scale=1e-3)),
            Column("preemptions, naive", extremes("preemptions", naive)),
            Column("lazy", extremes("preemptions", lazy)),
        ],
        rows=[Row([f"{rate:g}"], f"{rate:g}") for rate in rates],
        align="r" * 11,
    )


STOCK = ("stock vLLM (mode `off`)", "stock")
ARMS = (
    STOCK,
    ("`naive`, `none`: indirection only", "indirection"),
    ("`naive`, half kept", "naive, half kept"),
    ("`lazy`, half kept", "lazy, half kept"),
)
SYNCHRONOUS = ("`lazy`, half kept, synchronous", "lazy, half kept, synchronous")


def overhead(
    name: str,
    source: str,
    context: int,
    *,
    arms: tuple[tuple[str, str], ...] = ARMS,
) -> Table:
    """What the token layer costs at one context.

    Args:
        name: of the table.
        source: name of the JSON.
        context: tokens; the arms are ``stock@CONTEXT`` and so on.
        arms: label and name, without the context.
    """

    def compared(metric: str) -> list[Column]:
        return [
            Column("against stock", ratio(metric, f"stock@{context}")),
            Column("against the indirection", ratio(metric, f"indirection@{context}")),
        ]

    return Table(
        name=name,
        source=source,
        labels=["arm"],
        columns=[
            Column("output tokens per second", mean("output_throughput", 1)),
            *compared("output_throughput"),
            Column("time per output token, mean, ms", mean("mean_tpot_ms", 1)),
            *compared("mean_tpot_ms"),
        ],
        rows=[Row([label], f"{arm}@{context}") for label, arm in arms],
    )


HOG = Table(
    name="overhead, neighbours",
    source="overhead",
    labels=["arm"],
    columns=[
        Column("output tokens per second", mean("output_throughput", 1)),
        Column("against stock beside them", ratio("output_throughput", "stock+hog@512")),
        Column(
            "time per output token against stock beside them",
            ratio("mean_tpot_ms", "stock+hog@512"),
        ),
        Column("a batch of copies, ms", mean("mean_relocation_copy_ms", 1, missing="")),
        Column("a forward's wait for it, ms", mean("mean_relocation_stall_ms", 1, missing="")),
    ],
    rows=[
        Row(["stock vLLM"], "stock+hog@512"),
        Row(["indirection only"], "indirection+hog@512"),
        Row(["`naive`, half kept"], "naive, half kept+hog@512"),
        Row(["`lazy`, half kept"], "lazy, half kept+hog@512"),
        Row(["`lazy`, synchronous"], "lazy, half kept, synchronous+hog@512"),
    ],
)


def share(part: str, missing: str = "–") -> Cell:
    """Of a step, in per cent; stock vLLM has no token layer. The key is the profile's arm."""

    def cell(result: Result, key: str) -> str:
        found = result.data["arms"][key]["parts"][part]
        return f"{number(100 * found, 1)} %" if found else missing

    return cell


PROFILE = Table(
    name="step profile",
    source="step_profile",
    labels=["arm"],
    columns=[
        Column("attention", share("attention")),
        Column("write of new K/V", share("write of new K/V")),
        Column("token layer, scheduler", share("token layer in the scheduler")),
        Column("token layer, worker", share("token layer in the worker")),
        Column("model and the rest of vLLM", share("model and the rest of vLLM")),
    ],
    rows=[
        Row(["stock vLLM"], "stock"),
        Row(["`naive`, `none`: indirection only"], "naive none"),
        Row(["`naive`, `random`, half kept"], "naive random 50 %"),
        Row(["`lazy`, `random`, half kept"], "lazy random 50 %"),
    ],
)


def _of_client(client: str) -> Cell:
    def cell(result: Result, key: str) -> str:
        metric, _, digits = key.partition(":")
        return mean(metric, int(digits), client)(result, "")

    return cell


def _clients_ratio(result: Result, key: str) -> str:
    found = result.data["comparisons"][key.partition(":")[0]]
    figure = Figure(found["ratio"], *found["ci95"])
    return number(figure.value, 2) + interval(figure, 2)


GUIDELLM = Table(
    name="guidellm",
    source="guidellm",
    labels=[""],
    columns=[
        Column("`loadtest`", _of_client("loadtest")),
        Column("guidellm", _of_client("guidellm")),
        Column("ratio", _clients_ratio),
    ],
    rows=[
        Row(["output tokens per second"], "output_throughput:1"),
        Row(["latency, mean, ms"], "mean_e2el_ms:0"),
        Row(["time per output token, mean, ms"], "mean_tpot_ms:1"),
        Row(["time to first token, median, ms"], "median_ttft_ms:0"),
    ],
)

TABLES = [
    FRONTIER_DOCUMENT,
    closed_loops("sla", "sla", (4, 5, 6, 8, 10, 12), best=10),
    open_loops("sla, open loops", "sla_open", (0.5, 0.7, 0.85)),
    overhead("overhead", "overhead", 512, arms=(*ARMS, SYNCHRONOUS)),
    HOG,
    overhead("overhead, 256 tokens", "overhead_short", 256),
    overhead("overhead, 1024 tokens", "overhead_contexts", 1024),
    overhead("overhead, 1500 tokens", "overhead_contexts", 1500),
    PROFILE,
    GUIDELLM,
]
