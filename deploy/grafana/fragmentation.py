"""Fragmentation: how much of the retained memory holds evicted tokens, and what becomes of it."""

from __future__ import annotations

from deploy.grafana.model import Dashboard, Panel, Query, Row
from deploy.grafana.queries import BY_ENGINE, buckets, quantiles, rate, total

_WASTE = Row(
    "Waste",
    (
        Panel(
            "Waste ratio F",
            "Share of the slots of retained blocks that hold no live token (Eq. 1 of the paper), "
            "by instance and engine. Relocation is considered above θ_F, which may adapt to the "
            "load.",
            (
                Query("vtoken_waste_ratio{$S}", BY_ENGINE),
                Query("vtoken_effective_theta_f{$S}", f"θ_F of {BY_ENGINE}"),
            ),
            unit="percentunit",
            maximum=1,
            thresholds=((0.25, "orange"),),
        ),
        Panel(
            "Low-utilisation blocks",
            "Share of retained blocks that are at most half full of live tokens, by instance and "
            "engine.",
            (Query("vtoken_low_utilization_block_ratio{$S}", BY_ENGINE),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Blocks by utilisation",
            "Retained blocks by the share of their slots that hold live tokens. Relocation empties "
            "the lower rows and fills the top one.",
            (Query(total("vtoken_blocks_by_utilization", "utilization"), "{{utilization}}"),),
            unit="percentunit",
            kind="heatmap",
            width=24,
        ),
        Panel(
            "Retained against ideal blocks",
            "Blocks held by running requests, and what they would hold if live tokens were packed.",
            (
                Query(total("vtoken_retained_blocks"), "retained"),
                Query(total("vtoken_ideal_blocks"), "ideal"),
            ),
        ),
        Panel(
            "Pool",
            "Free, retained and all blocks. Free ones may still hold content that the prefix cache "
            "can use.",
            (
                Query(total("vtoken_free_blocks"), "free"),
                Query(total("vtoken_retained_blocks"), "retained"),
                Query(total("vtoken_total_blocks"), "all"),
            ),
        ),
    ),
)

_FLOW = Row(
    "Evicted and freed",
    (
        Panel(
            "Evicted tokens per second",
            "By policy.",
            (Query(rate("vtoken_evicted_tokens_total", "policy"), "{{policy}}"),),
            is_stacked=True,
        ),
        Panel(
            "Blocks freed per second",
            "Given back before their request ended: emptied by eviction alone, or by relocation.",
            (Query(rate("vtoken_freed_blocks_total", "how"), "{{how}}"),),
            is_stacked=True,
        ),
        Panel(
            "Live and dead tokens",
            "Of running requests.",
            (
                Query(total("vtoken_live_tokens"), "live"),
                Query(total("vtoken_dead_tokens"), "dead"),
            ),
            is_stacked=True,
        ),
        Panel(
            "Evictions not done",
            "Evictions per second that were skipped because a policy failed, or put off because it "
            "had no observations yet.",
            (
                Query(rate("vtoken_policy_errors_total", "policy"), "{{policy}} failed"),
                Query(rate("vtoken_evictions_postponed_total", "policy"), "{{policy}} put off"),
            ),
        ),
    ),
)

_REQUESTS = Row(
    "Per request",
    (
        Panel(
            "Blocks at the end of a request",
            "How many blocks a request still held when it ended.",
            buckets("vtoken_request_retained_blocks"),
            kind="heatmap",
        ),
        Panel(
            "Evicted tokens of a request",
            "How many tokens a request had lost when it ended.",
            buckets("vtoken_request_evicted_tokens"),
            kind="heatmap",
        ),
        Panel(
            "Blocks at the end of a request, quantiles",
            "The same as numbers.",
            quantiles("vtoken_request_retained_blocks", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Evicted tokens of a request, quantiles",
            "The same as numbers.",
            quantiles("vtoken_request_evicted_tokens", 0.5, 0.9, 0.99),
        ),
    ),
)

FRAGMENTATION = Dashboard(
    "vtoken-fragmentation",
    "vtoken-serve / Fragmentation",
    "Waste in the KV cache: where evicted tokens lie, and how blocks come free.",
    (_WASTE, _FLOW, _REQUESTS),
)
