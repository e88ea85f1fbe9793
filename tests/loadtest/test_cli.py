"""The command lines of the load test and of the evaluation."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from loadtest import cli, evaluate
from loadtest.outcome import Outcome
from loadtest.server import StartError
from service.auth_keys import parse_lines
from tests.loadtest.fake_service import KEY


def test_help_names_every_scenario(capsys):
    """And every option of the documentation."""
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in ("waste", "bookkeeping", "--quick", "--repeats", "--out", "--url"):
        assert word in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such"],
        [],
        ["waste", "--repeats", "-1"],
        ["waste", "--poll-seconds", "0"],
        ["waste", "--quick", "--smoke"],
        ["waste", "--set", "policies=h2o"],
    ],
)
def test_wrong_arguments_are_refused(arguments, capsys):
    """Exit code 2 and a sentence."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err


KEY_FILES = [
    "k1",
    "  k1 \n",
    "# of the team\r\n\r\n k1\r\nother\r\n",
    "alice: k1\nbob: k2\n",
    "alice:k1",
    "no name: k1",
    "a" * 65 + ": k1",
    "alice:  k 1 ",
]


@pytest.mark.parametrize("text", KEY_FILES)
def test_key_file_is_read_as_the_service_reads_it(tmp_path, text):
    """The first of its keys: one per line, with or without a name, comments left out."""
    (tmp_path / "key").write_bytes(text.encode())
    assert cli.read_key(tmp_path / "key") == parse_lines(text, "admin")[0][1]


@pytest.mark.parametrize("content", [None, b"", b"\n# k1\n", b"\xff"])
@pytest.mark.parametrize("option", ["--admin-key-file", "--api-key-file"])
def test_key_file_without_a_key_is_refused(tmp_path, capsys, content, option):
    """Before anything is measured, in a sentence with the file's name."""
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(SystemExit) as left:
        cli.main(["waste", option, str(tmp_path / "key")])
    assert left.value.code == 2
    assert str(tmp_path / "key") in capsys.readouterr().err


def test_given_service_is_measured(service, tmp_path, capsys):
    """``--url`` with the key from a file: results, report and the command that made them."""
    (tmp_path / "key").write_text(f"# of this machine\nloadtest: {KEY}\nother\n")
    options = ["--smoke", "--url", service.url, "--admin-key-file", str(tmp_path / "key")]
    options += ["--set", "keep_ratio=0.3", "--share-modes", "--poll-seconds", "0.05"]
    assert cli.main(["waste", *options, "--out", str(tmp_path), "--repeats", "1"]) == 0
    result = json.loads((tmp_path / "waste.json").read_text())
    assert result["command"] == (
        "scripts/loadtest waste --smoke --repeats 1 --set 'keep_ratio=0.3' "
        f"--url {service.url} --poll-seconds 0.05"
    )
    assert result["config"]["engine"] == "the service at --url"
    assert result["config"]["keep_ratio"] == 0.3
    assert "synthetic/random" in result["arms"]
    assert "synthetic/random" in capsys.readouterr().out


def test_failing_scenario_does_not_stop_the_others(tmp_path, monkeypatch):
    """The exit code says that one failed."""
    asked = []

    async def run_one(bench, name, out):
        asked.append(name)
        if name == "waste":
            raise StartError("no")

    monkeypatch.setattr(cli, "run_one", run_one)
    assert cli.main(["waste", "sla", "--out", str(tmp_path)]) == 1
    assert asked == ["waste", "sla"]
    assert cli.main(["sla", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StartError("the second service"), 1, "the second service"),
        (asyncio.CancelledError(), 143, "CancelledError"),
    ],
)
def test_what_was_measured_before_the_end_is_kept(
    service, tmp_path, monkeypatch, error, code, reason
):
    """Hours of samples are not lost with the service: the files are there, with the reason."""
    waste = cli.scenarios.load("waste")
    original = waste.run

    async def run(bench):
        await original(bench)
        raise error

    monkeypatch.setattr(waste, "run", run)
    (tmp_path / "key").write_text(KEY)
    options = ["--smoke", "--url", service.url, "--admin-key-file", str(tmp_path / "key")]
    assert cli.main(["waste", *options, "--out", str(tmp_path)]) == code
    result = json.loads((tmp_path / "waste.json").read_text())
    assert result["arms"]
    assert f"ended early, what was there is here: {reason}" in result["notes"]


def test_sigterm_ends_the_services(tmp_path, monkeypatch):
    """The fleet is left as after an error; the exit code tells the signal.

    A second signal does not end the ending.
    """
    left = []

    async def run_one(bench, name, out):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(600)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            left.append(name)

    monkeypatch.setattr(cli, "run_one", run_one)
    assert cli.main(["waste", "sla", "--out", str(tmp_path)]) == 143
    assert left == ["waste"]


def test_all_means_every_scenario(tmp_path, monkeypatch):
    """In their order."""
    asked = []

    async def run_one(bench, name, out):
        asked.append(name)

    monkeypatch.setattr(cli, "run_one", run_one)
    assert cli.main(["all", "--out", str(tmp_path)]) == 0
    assert asked == list(cli.scenarios.NAMES)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--quick"], evaluate.QUICK), ([], cli.scenarios.NAMES)],
)
def test_evaluate_runs_its_scenarios_and_summarizes(tmp_path, monkeypatch, arguments, names):
    """The headline, or everything; the summary has the paper's figures beside ours."""
    asked = []

    def main(argv):
        asked.extend(argv)
        outcome = Outcome(details={"paper": "twice as many"})
        outcome.add("a", {"m": 1})
        outcome.add("b", {"m": 2})
        outcome.compare("a", "b", ("m",))
        load = {"before": [], "after": [], "minutes": 0}
        built = cli.report.build("paired", outcome, command="x", size="full", load=load)
        cli.report.write(built, tmp_path)
        return 0

    left = tmp_path / "frontier.json"
    left.write_text('{"scenario": "of last week"}')
    os.utime(left, (1, 1))
    monkeypatch.setattr(evaluate.cli, "main", main)
    assert evaluate.main([*arguments, "--out", str(tmp_path)]) == 0
    assert tuple(asked[: len(names)]) == tuple(names)
    assert ("--share-modes" in asked) is ("--quick" in arguments)
    summary = (tmp_path / "summary.md").read_text()
    assert "Paper: twice as many." in summary
    assert "m: a / b" in summary
    assert "of last week" not in summary
