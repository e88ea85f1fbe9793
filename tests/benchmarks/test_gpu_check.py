"""The GPU check without a GPU: its report, its refusal, and its checks over torch's own code.

Its kernels are tested under ``tests/gpu_interp``.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import engine_tests
from benchmarks.gpu_check.attention import (
    check_attention,
    installed_kernels,
    make_decode,
    reference,
)
from benchmarks.gpu_check.copies import (
    check_bytes,
    check_order,
    make_layers,
    make_moves,
    measure_bandwidth,
    measure_stall,
)
from benchmarks.gpu_check.machine import SMALL, Machine
from benchmarks.gpu_check.report import Row, document, failed, table, wrong
from benchmarks.gpu_check.scores import check_scores
from benchmarks.gpu_check.tables import check_tables
from tests.engine import runner_v2 as runners
from vtoken.copy_engine.cuda import CudaCopyEngine
from vtoken.gpu_scores.mass import mass_by_index
from vtoken.kv_pages import PagedKV
from vtoken.paged_pool import PagedPool, move_by_index

ROOT = Path(__file__).parents[2]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fakes = _load(ROOT / "tests" / "copy_engine" / "fake_streams.py")


def seconds(work):
    """Host time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.fixture
def machine():
    """The CPU, small sizes."""
    return Machine(torch.device("cpu"), SMALL, seconds)


def make_pool(mover=move_by_index):
    """Two layers of one-token pages."""
    caches = make_layers(SMALL, "LBNHC", torch.bfloat16, torch.device("cpu"), page=1)
    return PagedPool([PagedKV.from_cache(cache) for cache in caches], mover)


def forget(family, src, dst):
    """A mover that copies nothing."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run scripts/gpu_check")
def test_without_cuda_it_says_so_in_one_sentence():
    """Exit status 2, nothing on standard output."""
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check"],
        env={"VTOKEN_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gpu_check needs a CUDA device: ")
    assert line.endswith(".")


def test_exit_status_and_json_follow_the_proofs(monkeypatch, tmp_path, capsys):
    """A failed proof is 1; a missed goal is not."""
    rows = [Row("copies", "kernel", 0.5, goal="goal ≥ 0.8"), Row("scores", "error", 0.0, ok=True)]
    monkeypatch.setattr(program, "why_no_cuda", lambda: None)
    monkeypatch.setattr(program, "run_all", lambda no_engine, deadline: iter(rows))
    out = tmp_path / "deep" / "gpu.json"
    assert program.main(["--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"][0]["goal"] == "goal ≥ 0.8"
    assert "goal ≥ 0.8" in capsys.readouterr().out
    rows.append(Row("tables", "rows", 3, ok=False))
    assert program.main([]) == 1


def test_table_aligns_and_names_wrong_rows():
    """Numbers get four digits, a reason stands at the end of its line."""
    rows = [Row("a", "long name", 0.123456, "µs"), Row("bcd", "x", "word", ok=False, note="why")]
    first, second = table(rows).splitlines()
    assert first == "a    long name  0.1235  µs"
    assert second == "bcd  x          word        WRONG  why"
    assert wrong(rows) == document(rows)["wrong"] == 1


def test_a_check_that_raises_is_a_failed_row(machine):
    """The others go on."""

    def check(machine):
        yield Row("copies", "first", 1)
        raise RuntimeError("out of memory\nand more")

    first, second = program.guarded("copies", check, machine)
    assert first.value == 1
    assert (second.ok, second.note) == (False, "RuntimeError: out of memory")
    assert failed("a", "b", ValueError("c")).note == "ValueError: c"


def test_moves_are_disjoint_and_inside_the_pool():
    """Scattered sources, packed destinations."""
    src, dst = make_moves(384, 100)
    assert len(set(src.tolist()) | set(dst.tolist())) == 200
    assert int(max(src.max(), dst.max())) < 384


def test_bytes_check_tells_a_mover_that_forgets(machine):
    """Right movers pass, a mutant is named with layout and dtype."""
    (row,) = check_bytes(machine, move_by_index)
    assert (row.ok, row.value) == (True, 0)
    (row,) = check_bytes(machine, forget)
    assert row.ok is False
    assert "LBNHC torch.bfloat16 page 1" in row.note


def test_order_check_tells_copies_that_come_late():
    """An engine that copies nothing reads as one that copied too late."""
    pool = make_pool()
    (row,) = check_order(CudaCopyEngine(pool, fakes.FakeStreams()), pool, 3)
    assert (row.value, row.ok) == (0, True)
    lazy = make_pool(forget)
    (row,) = check_order(CudaCopyEngine(lazy, fakes.FakeStreams()), lazy, 3)
    assert (row.value > 0, row.ok) == (True, False)


def test_bandwidth_compares_movers_with_the_devices_own_copy(machine):
    """A time and a share per mover and size; goals decide nothing."""
    rows = list(measure_bandwidth(machine, {"kernel": move_by_index, "torch": move_by_index}))
    assert [row.name.split(",")[0] for row in rows] == ["kernel", "kernel", "torch", "torch"]
    assert all(row.value > 0 and row.ok is None for row in rows)


def test_stall_is_measured_with_and_without_work_in_between():
    """Four rows: copy and stall, each way."""
    pool = make_pool()
    engine = CudaCopyEngine(pool, fakes.FakeStreams())
    rows = list(measure_stall(engine, pool, 8, lambda: None, 3, lambda: None))
    assert [row.name.split(",")[0] for row in rows] == ["copy", "stall", "copy", "stall"]
    assert all(row.value > 0 for row in rows)


def _torch_kernel(batch, key, value, table):
    def run():
        tokens = torch.cat([key, value], -1).flatten(0, 1)
        page = key.shape[1]
        slots = (table.long()[:, :, None] * page + torch.arange(page)).flatten(1)
        slots = slots[:, : batch.num_live]
        group = batch.query.shape[1] // key.shape[2]
        k, v = batch.split(tokens[slots].float().repeat_interleave(group, 2))
        logits = torch.einsum("rhd,rlhd->rhl", batch.query.float(), k) * batch.scale
        return torch.einsum("rhl,rlhd->rhd", logits.softmax(-1), v).to(batch.query.dtype)

    return run


def test_attention_check_compares_both_page_sizes_with_float32(machine):
    """A right kernel passes on both; one that reads the wrong slots does not; a crash is a row."""

    def shifted(batch, key, value, table):
        return _torch_kernel(batch, key, value, (table + 1) % len(key))

    def crashing(batch, key, value, table):
        raise RuntimeError("page size 1 is not supported")

    rows = list(check_attention(machine, {"torch": _torch_kernel, "off": shifted, "bad": crashing}))
    by_name = {row.name: row for row in rows}
    assert by_name["torch: error on pages of 1"].ok
    assert by_name["torch: pages of 1 cost"].value > 0
    assert by_name["off: error on pages of 1"].ok is False
    assert by_name["bad"].note == "RuntimeError: page size 1 is not supported"


def test_decode_batch_is_the_same_scattered_and_compacted(machine):
    """Live tokens equal through both tables; everything else in the scattered cache is NaN."""
    batch = make_decode(machine)
    live = batch.scattered[batch.slots.long(), 0]
    packed = batch.compacted[batch.blocks.long()].flatten(1, 2)[:, : batch.num_live]
    assert torch.equal(live, packed)
    assert int(batch.scattered.isnan().any(-1).sum()) == batch.scattered[..., 0].numel() // 2
    assert torch.isfinite(reference(batch)).all()


@pytest.mark.parametrize(("capability", "version"), [((9, 0), "3"), ((10, 0), "4")])
def test_kernels_follow_generation_and_what_is_installed(capability, version):
    """What is missing is named with the reason."""
    found, missing = installed_kernels(capability)
    assert f"FLASH_ATTN {version}" in found
    found, missing = installed_kernels((8, 0))
    reasons = {row.name: row.note for row in missing}
    assert "reads no pages of 1" in reasons["FLASH_ATTN"]
    assert reasons["FLASHINFER"] == "not installed"


def test_scores_and_tables_checks_pass_over_torch(machine):
    """Their rows with torch's scorer; a wrong scorer is told."""
    assert all(row.ok is not False for row in check_scores(machine, mass_by_index))
    assert all(row.ok is not False for row in check_tables(machine))
    half = list(check_scores(machine, lambda *args: 0.5 * mass_by_index(*args)))
    assert half[0].ok is False


def test_engine_tests_are_left_out_with_the_reason(monkeypatch):
    """Here vLLM is not built for CUDA; where pytest is missing, that is said."""
    (row,) = engine_tests.run_engine_tests(1)
    assert (row.value, row.ok) == ("left out", None)
    assert "not for CUDA" in row.note
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engine_tests.why_not() == "vllm is not installed"


@pytest.mark.parametrize(
    ("returncode", "output", "value", "ok", "note"),
    [
        (0, "....\n=== 41 passed in 20.1s ===", "41 passed in 20.1s", True, ""),
        (1, "F\n=== 1 failed, 3 passed in 2s ===", "1 failed, 3 passed in 2s", False, ""),
        (4, "usage", "pytest ended with 4", False, ""),
        (
            1,
            "E   UnsupportedError: this device failed 1 of 9 checks\n=== 1 error in 2s ===",
            "1 error in 2s",
            False,
            "UnsupportedError: this device failed 1 of 9 checks",
        ),
    ],
)
def test_pytests_summary_becomes_a_row(returncode, output, value, ok, note):
    """With the reason of a failure: a worker that refused its device says why."""
    row = engine_tests.verdict("v1: identity", returncode, output)
    assert (row.name, row.value, row.ok, row.note) == ("v1: identity", value, ok, note)


def run_parts(monkeypatch, pytest_run, seconds=1000):
    """The section's rows where there is a GPU, with pytest replaced."""
    monkeypatch.setattr(engine_tests, "why_not", lambda: None)
    monkeypatch.setattr(subprocess, "run", pytest_run)
    return list(engine_tests.run_engine_tests(seconds))


def test_both_runners_run_the_same_files(monkeypatch):
    """In turns, so that neither is left out when time runs short; at last both in one."""
    asked = []

    def run(command, env, **kwargs):
        asked.append((command[-1], env[engine_tests.SWITCH]))
        return subprocess.CompletedProcess(command, 0, "=== 3 passed in 2s ===")

    rows = run_parts(monkeypatch, run)
    assert all(row.ok for row in rows)
    assert len({row.name for row in rows}) == len(rows) == len(asked)
    *by_runner, both = asked
    for runner in engine_tests.RUNNERS:
        files = [path for path, switch in by_runner if switch == runner]
        assert files == [path for path, _ in by_runner[::2]]
    assert both == (
        "tests/engine/test_runner_v2.py::test_both_runners_agree_token_for_token",
        "",
    )


def test_a_part_that_fails_does_not_end_the_others(monkeypatch):
    """Each has a verdict of its own."""

    def run(command, env, **kwargs):
        failed = env[engine_tests.SWITCH] == "v1"
        summary = "=== 1 failed in 2s ===" if failed else "=== 1 passed in 2s ==="
        return subprocess.CompletedProcess(command, int(failed), summary)

    rows = run_parts(monkeypatch, run)
    assert [row.ok for row in rows[:4]] == [True, False, True, False]
    assert len(rows) == len(engine_tests.PARTS)


def test_engine_tests_that_take_too_long_are_unfinished(monkeypatch):
    """Not a failure: the check has eight minutes. What to type instead is said."""

    def run(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired("pytest", timeout)

    row, *_ = run_parts(monkeypatch, run)
    assert (row.value, row.ok) == ("unfinished", None)
    assert "VTOKEN_TEST_RUNNER=v2 python -m pytest tests/engine/test_runner_v2.py" in row.note


def test_without_time_nothing_is_started(monkeypatch):
    """An engine could not even start."""
    rows = run_parts(monkeypatch, None, seconds=5)
    assert {(row.value, row.ok) for row in rows} == {("left out", None)}


@pytest.mark.parametrize("part", engine_tests.PARTS, ids=lambda part: part.name)
def test_the_parts_are_there(part):
    """Files of engine tests, and the test that is named."""
    path, _, test = part.path.partition("::")
    text = (ROOT / path).read_text()
    assert "pytest.mark.engine" in text
    assert f"def {test}" in text


@pytest.mark.parametrize("runner", engine_tests.RUNNERS)
def test_the_switch_takes_a_runner_of_the_real_device(monkeypatch, runner):
    """Where there is one: then no interpreter is installed, and vLLM schedules as it is told."""
    monkeypatch.setattr(os, "environ", {runners.SWITCH: runner})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = {"runner": "v2", "async": False, "engine": {"dtype": "float32"}}
    assert runners.SWITCH == engine_tests.SWITCH
    assert runners.use_runner(spec) == {"async_scheduling": False}
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == {"v2": "1", "v1": "0"}[runner]
    assert "TRITON_INTERPRET" not in os.environ
