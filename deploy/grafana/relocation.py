"""Relocation: what is copied, what it costs the forward passes, and why it is not done."""

from __future__ import annotations

from deploy.grafana.model import Dashboard, Panel, Query, Row
from deploy.grafana.queries import BY_ENGINE, buckets, mean, quantiles, rate, total

_BY_RELOCATION = 'how="relocation"'
_COMMITTED = 'outcome="committed"'

_COPIES = Row(
    "Copies",
    (
        Panel(
            "Relocations per second",
            "Plans by outcome. Rolled back: the request ended or was preempted meanwhile. Shared: "
            "batches in which all holders of shared blocks copied their tokens out.",
            (
                Query(rate("vtoken_relocations_total", "outcome"), "{{outcome}}"),
                Query(rate("vtoken_shared_relocations_total"), "of shared blocks"),
            ),
        ),
        Panel(
            "Copied bytes per second",
            "K/V bytes copied by the copy engine.",
            (Query(rate("vtoken_relocated_bytes_total"), "copied"),),
            unit="Bps",
        ),
        Panel(
            "Moved tokens per second",
            "Tokens moved by committed plans.",
            (Query(rate("vtoken_relocated_tokens_total"), "moved"),),
        ),
        Panel(
            "Blocks freed by a committed relocation",
            "Net of destinations, mean.",
            (
                Query(
                    f"{rate('vtoken_freed_blocks_total', '', _BY_RELOCATION)}"
                    f" / {rate('vtoken_relocations_total', '', _COMMITTED)}",
                    "freed",
                ),
            ),
        ),
    ),
)

_COST = Row(
    "Cost",
    (
        Panel(
            "Stall of a forward pass",
            "Time for which a forward pass waited for copies.",
            quantiles("vtoken_relocation_stall_seconds", 0.5, 0.99),
            unit="s",
            thresholds=((0.01, "orange"),),
        ),
        Panel(
            "Copy time of a batch",
            "Time to copy one batch of moves; it overlaps with sampling and scheduling.",
            quantiles("vtoken_relocation_copy_seconds", 0.5, 0.99),
            unit="s",
        ),
        Panel(
            "Stalls",
            "Distribution of the waits.",
            buckets("vtoken_relocation_stall_seconds"),
            unit="s",
            kind="heatmap",
        ),
        Panel(
            "Share of copying that stalls",
            "Time waited / time copied: 0 is full overlap.",
            (
                Query(
                    f"{rate('vtoken_relocation_stall_seconds_sum')}"
                    f" / {rate('vtoken_relocation_copy_seconds_sum')}",
                    "stalled",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Scheduler overhead of a step",
            "Mean time that the token layer adds in the scheduler and in the worker.",
            (
                Query(mean("vtoken_scheduler_overhead_seconds"), "scheduler"),
                Query(mean("vtoken_worker_overhead_seconds"), "worker"),
            ),
            unit="s",
        ),
        Panel(
            "Plans in flight",
            "Sent to the worker and not yet settled; and engines in which an invariant violation "
            "has stopped relocation.",
            (
                Query(total("vtoken_in_flight_relocations"), "in flight"),
                Query(total("vtoken_relocation_disabled"), "engines stopped"),
            ),
        ),
    ),
)

_PRESSURE = Row(
    "Pressure",
    (
        Panel(
            "Looks without a plan, per second",
            "Why a look for relocation work ended without a plan.",
            (Query(rate("vtoken_reclaim_skipped_total", "reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Free blocks and headroom",
            "Headroom is kept back from admission as destinations; below it relocation starves.",
            (
                Query(total("vtoken_free_blocks"), "free"),
                Query(total("vtoken_headroom_blocks"), "headroom"),
            ),
        ),
        Panel(
            "Backpressure",
            "Share of time in which the headroom held back the admission of a waiting request, by "
            "instance and engine.",
            (
                Query(
                    "rate(vtoken_headroom_backpressure_seconds_total{$S}[$__rate_interval])",
                    BY_ENGINE,
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Preemptions and urgent relocations per second",
            "Requests preempted, allocations that an urgent relocation made possible instead, and "
            "such urgent relocations.",
            (
                Query(rate("vtoken_preemptions_total"), "preempted"),
                Query(rate("vtoken_preemptions_avoided_total"), "avoided"),
                Query(rate("vtoken_urgent_relocations_total"), "urgent relocations"),
            ),
        ),
    ),
)

RELOCATION = Dashboard(
    "vtoken-relocation",
    "vtoken-serve / Relocation",
    "Copies of live tokens: volume, stalls, outcomes, skip reasons and headroom.",
    (_COPIES, _COST, _PRESSURE),
)
