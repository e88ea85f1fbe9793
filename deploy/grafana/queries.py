"""The shapes of query that the dashboards share."""

from __future__ import annotations

from deploy.grafana.model import Query

WINDOW = "[$__rate_interval]"

BY_ENGINE = "{{instance}} #{{engine}}"
"""Legend of one line per engine; an instance has several under data parallelism."""


def rate(counter: str, by: str = "", matchers: str = "") -> str:
    """Events per second, summed over instances, by one label if named."""
    grouping = f" by ({by})" if by else ""
    extra = f",{matchers}" if matchers else ""
    return f"sum{grouping} (rate({counter}{{$S{extra}}}{WINDOW}))"


def http_rate(by: str, matchers: str = "") -> str:
    """HTTP answers per second, summed over instances, by these labels."""
    extra = f",{matchers}" if matchers else ""
    return f"sum by ({by}) (rate(http_requests_total{{$HTTP{extra}}}{WINDOW}))"


def total(gauge: str, by: str = "") -> str:
    """A gauge, summed over instances, by one label if named."""
    return f"sum by ({by}) ({gauge}{{$S}})" if by else f"sum({gauge}{{$S}})"


def by_instance(expr: str, by: str = "") -> str:
    """The sum over instances of what all engines of one give alike, by one label if named."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (max without (engine) ({expr}))"


def quantiles(histogram: str, *ranks: float) -> tuple[Query, ...]:
    """Quantiles of a histogram over all instances."""
    return tuple(Query(quantile(histogram, rank), f"p{rank * 100:g}") for rank in ranks)


def quantile(histogram: str, rank: float) -> str:
    """One quantile of a histogram over all instances."""
    return f"histogram_quantile({rank:g}, {rate(histogram + '_bucket', 'le')})"


def mean(histogram: str) -> str:
    """The mean of a histogram's observations over all instances."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def buckets(histogram: str) -> tuple[Query, ...]:
    """Observations per bucket, for a heatmap."""
    return (Query(f"sum by (le) (increase({histogram}_bucket{{$S}}{WINDOW}))", "{{le}}"),)
