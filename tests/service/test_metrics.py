"""The collector speaks Prometheus, shows every family from the start and loses no count."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service import metrics_docs
from service.health import CODES
from service.metrics import PREFIX, SERVICE_METRICS, VTokenCollector, register
from service.poller import MetricsPoller
from service.refusals import Refusals
from vtoken.config import VTokenConfig
from vtoken.stats import METRICS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BASE = {"model_name": "m", "engine": "0"}


def make_collector(config: VTokenConfig | None = None, **options) -> VTokenCollector:
    return VTokenCollector("m", (config or VTokenConfig()).to_dict(), **options)


def scrape(collector: VTokenCollector) -> dict[str, dict[tuple, float]]:
    """Sample name to labels to value, through the text format and its parser."""
    registry = CollectorRegistry()
    registry.register(collector)
    samples: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in BASE}
            assert sample.labels.items() >= BASE.items()
            samples.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return samples


def sample_names(spec) -> set[str]:
    suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
    return {PREFIX + spec.name + suffix for suffix in suffixes}


ALL_NAMES = set().union(*map(sample_names, [*METRICS.values(), *SERVICE_METRICS]))


def test_every_family_is_there_before_the_first_poll():
    """With value zero, initial labels included; only policy_info is 1."""
    samples = scrape(make_collector(clock=lambda: 5.0))
    assert set(samples) == ALL_NAMES
    for name, by_label in samples.items():
        assert set(by_label.values()) == {1.0 if name == "vtoken_policy_info" else 0.0}, name
    assert len(samples["vtoken_relocations_total"]) == 3
    assert samples["vtoken_evicted_tokens_total"] == {(("policy", "streaming_llm"),): 0.0}


def test_values_are_those_of_the_snapshot(engine):
    """Counters, gauges and histograms, each in its own form."""
    engine.stats.inc("evicted_tokens_total", 7, "random")
    engine.stats.inc("relocated_tokens_total", 3)
    engine.stats.set("waste_ratio", 0.5)
    engine.stats.set("blocks_by_utilization", 9, "0.25")
    collector = make_collector()
    collector.update(engine.snapshot())
    samples = scrape(collector)
    assert samples["vtoken_evicted_tokens_total"][(("policy", "random"),)] == 7
    assert samples["vtoken_relocated_tokens_total"] == {(): 3}
    assert samples["vtoken_waste_ratio"] == {(): 0.5}
    by_range = samples["vtoken_blocks_by_utilization"]
    assert len(by_range) == 8
    assert by_range[(("utilization", "0.25"),)] == sum(by_range.values()) == 9


def test_histograms_are_cumulative(engine):
    """A bucket counts all observations up to its bound; +Inf counts all."""
    for num_blocks in (1, 2, 2, 5, 100_000):
        engine.stats.observe("request_retained_blocks", num_blocks)
    collector = make_collector()
    collector.update(engine.snapshot())
    samples = scrape(collector)
    by_bound = {
        dict(k)["le"]: v for k, v in samples["vtoken_request_retained_blocks_bucket"].items()
    }
    assert (by_bound["1.0"], by_bound["2.0"], by_bound["8.0"], by_bound["+Inf"]) == (1, 3, 4, 5)
    assert all(a <= b for a, b in itertools.pairwise(by_bound.values()))
    assert samples["vtoken_request_retained_blocks_count"] == {(): 5}
    assert samples["vtoken_request_retained_blocks_sum"] == {(): 100_010}


def test_policy_info_follows_the_policy(engine):
    """One series, with the labels in force."""
    collector = make_collector()
    engine.config = engine.config.patched({"policy": "random", "theta_f": 0.5})
    engine.version = 3
    collector.update(engine.snapshot())
    labels = {"policy": "random", "mode": "lazy", "theta_f": "0.5", "version": "3"}
    assert scrape(collector)["vtoken_policy_info"] == {tuple(sorted(labels.items())): 1}


def test_counters_never_fall_across_a_policy_change(engine):
    """A new label comes beside the old one; no counter is lost or reset."""
    collector = make_collector()
    counters = [s for s in METRICS.values() if s.kind == "counter"]
    scrapes = [scrape(collector)]
    for policy in ("streaming_llm", "random", "none", "streaming_llm"):
        engine.config = engine.config.patched({"policy": policy})
        engine.version += 1
        engine.stats.inc("evicted_tokens_total", 5, policy)
        engine.stats.inc("policy_changes_total")
        collector.update(engine.snapshot())
        scrapes.append(scrape(collector))
    for before, after in itertools.pairwise(scrapes):
        for spec in counters:
            for labels, value in before[PREFIX + spec.name].items():
                assert after[PREFIX + spec.name][labels] >= value
    assert scrapes[-1]["vtoken_evicted_tokens_total"][(("policy", "streaming_llm"),)] == 10


def test_mode_off_shows_only_what_is_of_the_server():
    """There is nothing else to measure."""
    samples = scrape(make_collector(VTokenConfig(mode="off")))
    shown = {"vtoken_policy_info", "vtoken_not_ready", "vtoken_refused_requests_total"}
    assert set(samples) == shown
    assert dict(next(iter(samples["vtoken_policy_info"])))["mode"] == "off"


@pytest.mark.parametrize("mode", ["off", "lazy"])
def test_reasons_of_not_being_ready_come_and_go(mode):
    """Each has its series from the start, whatever the mode; the last scrape's word holds."""
    codes: set[str] = set()
    collector = make_collector(VTokenConfig(mode=mode), not_ready_codes=lambda: codes)
    for now in ({"draining", "engine_stalled"}, set()):
        codes = now
        by_reason = {dict(k)["reason"]: v for k, v in scrape(collector)["vtoken_not_ready"].items()}
        assert by_reason == {code: float(code in now) for code in CODES}


def test_what_is_of_the_server_is_told_once_however_many_engines():
    """A sum over the label engine is the number of requests, of pods that are not ready, …"""
    refusals, now = Refusals(), [0.0]
    collector = make_collector(
        engines=("0", "1"),
        refusals=refusals.totals,
        not_ready_codes=lambda: {"draining"},
        clock=lambda: now[0],
    )
    refusals.count("max_queue_seconds")
    collector.count_failure()
    now[0] = 1.0
    found = {family.name: family.samples for family in collector.collect()}
    of_server = ("refused_requests", "not_ready", "poll_failures", "snapshot_age_seconds")
    for samples in (found[PREFIX + name] for name in of_server):
        assert {sample.labels["engine"] for sample in samples} == {"0"}
        assert sum(sample.value for sample in samples) == 1
    of_engines = found.keys() - {PREFIX + name for name in of_server}
    for samples in (found[name] for name in of_engines):
        assert {sample.labels["engine"] for sample in samples} == {"0", "1"}


@pytest.mark.parametrize("broken", [{}, {"stats": {}}, None, {"stats": 1, "config": 2}])
def test_broken_snapshot_keeps_the_last(engine, broken):
    """An unreadable reply is refused whole."""
    collector = make_collector()
    engine.stats.set("waste_ratio", 0.5)
    collector.update(engine.snapshot())
    with pytest.raises((KeyError, TypeError, AttributeError)):
        collector.update(broken)
    assert scrape(collector)["vtoken_waste_ratio"] == {(): 0.5}


def test_poller_survives_and_counts_failures(make, engine, caplog):
    """Failures are counted, logged once per outage, and the next reading counts again."""
    now = [0.0]
    collector = make_collector(clock=lambda: now[0])
    poller = MetricsPoller(make.link(engine), collector, interval_seconds=1)

    async def outage() -> None:
        await poller.poll_once()
        now[0], engine.error = 10.0, Exception("boom")
        await poller.poll_once()
        await poller.poll_once()

    asyncio.run(outage())
    samples = scrape(collector)
    assert samples["vtoken_poll_failures_total"] == {(): 2}
    assert samples["vtoken_snapshot_age_seconds"] == {(): 10}
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    engine.error = None
    asyncio.run(poller.poll_once())
    assert scrape(collector)["vtoken_snapshot_age_seconds"] == {(): 0}


def test_poller_counts_unreadable_snapshots(make, engine):
    """An engine of another version does not end the polling."""
    collector = make_collector()
    engine.reply = {"ok": {"stats": {}}}
    poller = MetricsPoller(make.link(engine), collector, interval_seconds=1)
    asyncio.run(poller.poll_once())
    assert scrape(collector)["vtoken_poll_failures_total"] == {(): 1}


def test_poller_runs_until_cancelled(make, engine):
    """It reads again and again, at its interval."""
    poller = MetricsPoller(make.link(engine), make_collector(), interval_seconds=0.001)

    async def run_shortly() -> None:
        task = asyncio.create_task(poller.run())
        while len(engine.calls) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_shortly())


def test_register_replaces_an_earlier_collector():
    """A second app in one process does not fail on names that exist."""
    registry = CollectorRegistry()
    register(make_collector(), registry)
    register(make_collector(), registry)
    assert generate_latest(registry).count(b"# TYPE vtoken_waste_ratio") == 1


def test_document_is_fresh_and_names_every_family():
    """docs/metrics.md is what the code says."""
    assert metrics_docs.main(["--check", str(DOCUMENT)]) == 0
    text = DOCUMENT.read_text(encoding="utf-8")
    for spec in [*METRICS.values(), *SERVICE_METRICS]:
        assert f"`{PREFIX}{spec.name}`" in text
        assert spec.help in text


def test_document_check_notices_staleness(tmp_path, capsys):
    """Exit code 1 and the command that repairs it; then it passes."""
    path = tmp_path / "metrics.md"
    assert metrics_docs.main(["--check", str(path)]) == 1
    assert "--write" in capsys.readouterr().err
    assert metrics_docs.main(["--write", str(path)]) == 0
    assert metrics_docs.main(["--check", str(path)]) == 0
