"""Policy: which document is in force where, and what its last change did."""

from __future__ import annotations

from deploy.grafana.model import Dashboard, Panel, Query, Row
from deploy.grafana.queries import WINDOW, by_instance, mean

_NOW = Row(
    "In force",
    (
        Panel(
            "Policies",
            "The document of each engine. Instances with different versions were patched apart.",
            (Query("vtoken_policy_info{$S}"),),
            kind="table",
            width=16,
        ),
        Panel(
            "Changes",
            "Live changes of the policy document in the dashboard's time range.",
            (
                Query(
                    f"round({by_instance('increase(vtoken_policy_changes_total{$S}[$__range])')})",
                    "changes",
                ),
            ),
            kind="stat",
            width=8,
        ),
    ),
)


def _compared(
    title: str, description: str, expr: str, unit: str = "short", maximum: float | None = None
) -> Panel:
    """The value now, and the same query ``$compare`` ago on the same axis."""
    before = expr.replace(WINDOW, f"{WINDOW} offset $compare")
    if before == expr:
        before = expr.replace("{$S}", "{$S} offset $compare")
    queries = (Query(expr, "now"), Query(before, "$compare before"))
    return Panel(title, description, queries, unit, maximum=maximum)


_EFFECT = Row(
    "Before and after",
    (
        _compared(
            "Waste ratio F",
            "Mean over engines.",
            "avg(vtoken_waste_ratio{$S})",
            "percentunit",
            1,
        ),
        _compared(
            "Retained blocks per running request",
            "Over all instances.",
            "sum(vtoken_retained_blocks{$S}) / sum(vllm:num_requests_running{$S})",
        ),
        _compared(
            "Generated tokens per second",
            "Over all instances.",
            f"sum(rate(vllm:generation_tokens_total{{$S}}{WINDOW}))",
        ),
        _compared(
            "Mean time between tokens",
            "Over all instances.",
            mean("vllm:inter_token_latency_seconds"),
            "s",
        ),
        _compared(
            "Evicted tokens per second",
            "Over all instances and policies.",
            f"sum(rate(vtoken_evicted_tokens_total{{$S}}{WINDOW}))",
        ),
        _compared(
            "Preemptions per second",
            "Over all instances.",
            f"sum(rate(vllm:num_preemptions_total{{$S}}{WINDOW}))",
        ),
    ),
)

POLICY = Dashboard(
    "vtoken-policy",
    "vtoken-serve / Policy",
    "The policy document, its versions as annotations, and a comparison with an earlier time.",
    (_NOW, _EFFECT),
    has_compare=True,
)
