"""Overview: is the service well, how much does it serve, how fast, how full is the KV cache."""

from __future__ import annotations

from deploy.grafana.model import Dashboard, Panel, Query, Row
from deploy.grafana.queries import (
    BY_ENGINE,
    by_instance,
    http_rate,
    mean,
    quantile,
    quantiles,
    rate,
    total,
)

_BAD = 'finished_reason=~"abort|error"'


def _tile(
    title: str, description: str, expr: str, unit: str, *thresholds: tuple[float, str]
) -> Panel:
    query = (Query(expr, title),)
    return Panel(title, description, query, unit, "stat", 4, 4, thresholds)


_SLO = Row(
    "Service levels",
    (
        _tile(
            "Time to first token, p99",
            "99th percentile over the dashboard's rate window.",
            quantile("vllm:time_to_first_token_seconds", 0.99),
            "s",
            (1, "yellow"),
            (5, "red"),
        ),
        _tile(
            "Between tokens, p99",
            "99th percentile of the time between two tokens of a stream.",
            quantile("vllm:inter_token_latency_seconds", 0.99),
            "s",
            (0.1, "yellow"),
            (0.5, "red"),
        ),
        _tile(
            "Requests not finished well",
            "Share of ended requests that ended by abort or error.",
            f"({rate('vllm:request_success_total', '', _BAD)} or vector(0))"
            f" / {rate('vllm:request_success_total')}",
            "percentunit",
            (0.01, "yellow"),
            (0.05, "red"),
        ),
        _tile(
            "Waiting requests",
            "Requests in the queue, over all instances.",
            total("vllm:num_requests_waiting"),
            "short",
            (1, "yellow"),
            (16, "red"),
        ),
        _tile(
            "KV cache in use",
            "Fullest engine.",
            "max(vllm:kv_cache_usage_perc{$S})",
            "percentunit",
            (0.8, "yellow"),
            (0.95, "red"),
        ),
        _tile(
            "Statistics' age",
            "Age of the token layer's statistics; grows while the engine does not answer.",
            "max(vtoken_snapshot_age_seconds{$S})",
            "s",
            (10, "yellow"),
            (60, "red"),
        ),
    ),
)

_THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens per second",
            "Prompt tokens processed and tokens generated.",
            (
                Query(rate("vllm:prompt_tokens_total"), "prompt"),
                Query(rate("vllm:generation_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "Requests",
            "Requests in the batch, and those in the queue: for want of room (capacity), or for "
            "something else, as a KV transfer or an adapter (deferred).",
            (
                Query(total("vllm:num_requests_running"), "running"),
                Query(
                    total("vllm:num_requests_waiting_by_reason", "reason"), "waiting: {{reason}}"
                ),
            ),
        ),
        Panel(
            "Ended requests per second",
            "By the reason why they ended.",
            (Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            "Preemptions per second",
            "Requests thrown out of the batch for want of blocks, to be computed again: all of "
            "vLLM's, those under the token layer, and those that a relocation avoided.",
            (
                Query(rate("vllm:num_preemptions_total"), "all"),
                Query(rate("vtoken_preemptions_total"), "under the token layer"),
                Query(rate("vtoken_preemptions_avoided_total"), "avoided by relocation"),
            ),
        ),
    ),
)

_HTTP = Row(
    "Readiness and HTTP",
    (
        Panel(
            "Instances not ready, by reason",
            "Why /health/ready is red; an instance may have several reasons.",
            (Query(by_instance("vtoken_not_ready{$S}", "reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Answers per second",
            "By class of status, without probes and scrapes. What is refused for its key, or "
            "because the server starts or stops, is in the log alone.",
            (Query(http_rate("status"), "{{status}}"),),
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            "Refused and failed per second, by route",
            "4xx: a bad or too long request, or a limit reached; the log has the exact status. "
            "5xx: the server's fault, or a request that ran out of time.",
            (Query(http_rate("handler, status", 'status=~"4xx|5xx"'), "{{handler}} {{status}}"),),
            unit="reqps",
        ),
        Panel(
            "Turned away or ended early per second, by reason",
            "What a limit of this server refused, named after its setting; draining: it stops; "
            "the last two ended a request that was accepted.",
            (Query(rate("vtoken_refused_requests_total", "reason"), "{{reason}}"),),
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            "Tokens of a request",
            "Half of the requests have fewer, and 99 %.",
            (
                Query(quantile("vllm:request_prompt_tokens", 0.5), "prompt p50"),
                Query(quantile("vllm:request_prompt_tokens", 0.99), "prompt p99"),
                Query(quantile("vllm:request_generation_tokens", 0.5), "generated p50"),
                Query(quantile("vllm:request_generation_tokens", 0.99), "generated p99"),
            ),
        ),
    ),
)

_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From arrival to the first token.",
            quantiles("vllm:time_to_first_token_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Time between tokens",
            "Between two tokens of a stream.",
            quantiles("vllm:inter_token_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Request latency",
            "From arrival to the last token.",
            quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Mean time by phase",
            "Where a request spends its time.",
            (
                Query(mean("vllm:request_queue_time_seconds"), "queue"),
                Query(mean("vllm:request_prefill_time_seconds"), "prefill"),
                Query(mean("vllm:request_decode_time_seconds"), "decode"),
            ),
            unit="s",
            is_stacked=True,
        ),
    ),
)

_KV = Row(
    "KV cache",
    (
        Panel(
            "Pool in use",
            "Share of the KV blocks in use, by instance and engine.",
            (Query("vllm:kv_cache_usage_perc{$S}", BY_ENGINE),),
            unit="percentunit",
            maximum=1,
            thresholds=((0.95, "red"),),
        ),
        Panel(
            "Prefix cache",
            "Share of looked-up prompt tokens that were found.",
            (
                Query(
                    f"{rate('vllm:prefix_cache_hits_total')}"
                    f" / {rate('vllm:prefix_cache_queries_total')}",
                    "hits",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Tokens of running requests",
            "Live tokens are read by attention, dead ones were evicted.",
            (
                Query(total("vtoken_live_tokens"), "live"),
                Query(total("vtoken_dead_tokens"), "dead"),
            ),
            is_stacked=True,
        ),
        Panel(
            "Token layer overhead",
            "Mean time that the token layer adds to one engine step, without copies.",
            (
                Query(mean("vtoken_scheduler_overhead_seconds"), "scheduler"),
                Query(mean("vtoken_worker_overhead_seconds"), "worker"),
            ),
            unit="s",
            is_stacked=True,
        ),
        Panel(
            "Failed readings of the engine",
            "Readings of the engine's statistics that failed, per second.",
            (Query(rate("vtoken_poll_failures_total"), "failed"),),
        ),
        Panel(
            "Online checks",
            "Invariant checks and violations per second; any violation is an incident.",
            (
                Query(rate("vtoken_invariant_checks_total", "invariant"), "{{invariant}} checks"),
                Query(
                    rate("vtoken_invariant_violations_total", "invariant"),
                    "{{invariant}} violations",
                ),
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    "vtoken-overview",
    "vtoken-serve / Overview",
    "Service levels, throughput, latency and KV cache of vtoken-serve.",
    (_SLO, _THROUGHPUT, _HTTP, _LATENCY, _KV),
)
