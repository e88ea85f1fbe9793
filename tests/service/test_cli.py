"""The command line: each foreseen error is one sentence with an exit code, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from service import cli, cli_serve
from service.settings.token_layer import FIELD_NAMES
from vtoken.errors import UnsupportedError


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``vtoken-serve`` as a shell would, without the caller's VTOKEN_* settings."""
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """The command takes the signals of its process, which is this one in some tests."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


WITH_VLLM = """
import json, os, sys
from service import cli, serve  # vLLM with it: once for all commands
for line in sys.stdin:
    *arguments, name = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number in (1, 2):
        os.dup2(os.open(f"{name}.{number}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["vtoken-serve", *arguments]
    sys.exit(cli.main(arguments))
"""
"""Reads commands from standard input and runs each in a process of its own."""


@pytest.fixture(scope="module")
def run_with_vllm(tmp_path_factory):
    """As :func:`run_command`, where vLLM was imported already."""
    folder = tmp_path_factory.mktemp("commands")
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", WITH_VLLM],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            name = folder / str(len(list(folder.iterdir())))
            print(json.dumps([*arguments, str(name)]), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            said = [Path(f"{name}.{number}").read_text() for number in (1, 2)]
            return subprocess.CompletedProcess(arguments, code, *said)

        yield run
        assert process.stdin is not None
        process.stdin.close()


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """Our one sentence on standard error; fails if there is a traceback or a second one."""
    assert "Traceback" not in result.stderr
    ours = [line for line in result.stderr.splitlines() if line.startswith("vtoken-serve: ")]
    assert len(ours) == 1, result.stderr
    return ours[0]


def main_fails(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str]:
    code = cli.main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return code, lines[0]


def test_version_names_both_programs():
    """Without importing vLLM, so it is quick."""
    result = run_command("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("vtoken-serve 0.")
    assert "vLLM 0.32.0" in result.stdout


def test_serve_help_shows_every_flag_of_ours_and_the_way_to_vllms(capsys):
    """A stranger finds all flags from here."""
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for name in FIELD_NAMES:
        assert "--vtoken-" + name.replace("_", "-") in text
    assert "--help=all" in text
    assert "VTOKEN_ADMIN_KEY" in text


def test_help_without_command(capsys):
    """Every command is named, and how to learn more."""
    assert cli.main(["-h"]) == 0
    text = capsys.readouterr().out
    assert "COMMAND --help" in text
    for command in ("serve", "size", "status", "policy", "top"):
        assert f"\n  {command} " in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "a command is missing"),
        (["srve"], "unknown command 'srve'; try vtoken-serve serve"),
        (["polcy"], "unknown command 'polcy'; try vtoken-serve policy"),
        (["serve", "--vtoken-thta-f", "1"], "did you mean --vtoken-theta-f?"),
        (["serve", "--vtoken-theta-f", "1.5"], "theta_f=1.5 is not allowed"),
        (["serve", "--vtoken-theta-f", "high"], "theta_f='high' is not allowed"),
        (["serve", "--vtoken-mode", "fast"], "one of off, naive, lazy"),
        (["serve", "--vtoken-keep-ratio", "0"], "keep_ratio"),
        (["serve", "--vtoken-keep-ratio", "0.5", "--vtoken-budget-tokens", "64"], "exactly one"),
    ],
)
def test_mistakes_in_our_flags_are_told_before_vllm_is_imported(capsys, arguments, expected):
    """Exit code 2 and one sentence, at once."""
    code, line = main_fails(capsys, arguments)
    assert code == 2
    assert line.startswith("vtoken-serve: ")
    assert expected in line


def test_mistakes_in_the_environment_are_told_likewise(capsys, monkeypatch):
    """The variable is named."""
    monkeypatch.setenv("VTOKEN_SINK_TOKENS", "many")
    code, line = main_fails(capsys, ["serve"])
    assert code == 2
    assert "VTOKEN_SINK_TOKENS='many'" in line
    monkeypatch.delenv("VTOKEN_SINK_TOKENS")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", "/nowhere/keys")
    assert "VTOKEN_ADMIN_KEY_FILE" in main_fails(capsys, ["serve"])[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedError("sliding\nwindow"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_serving_raises_becomes_an_exit_code(capsys, monkeypatch, error, code):
    """A reason stays one line; signals have the shell's codes."""

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli_serve, "main", fail)
    assert cli.main(["serve"]) == code
    expected = "vtoken-serve: sliding window\n" if code == 1 else ""
    assert capsys.readouterr().err == expected


SLOW = """
import sys, time
from service import cli

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            print("importing", flush=True)
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    print("swallowed", flush=True)

sys.meta_path.insert(0, Slow())
sys.exit(cli.main(["serve", "--port", "0"]))
"""
"""The command, with an import that does not end, whatever is raised in it."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["service.cli_serve", "service.serve"])
def test_stop_during_the_imports(number, module, tmp_path):
    """Handled before: without a handler, the first process of a container gets no SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, module],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        assert bool(list(tmp_path.iterdir())) == (module == "service.serve")
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 128 + number
    assert said == f"vtoken-serve: stopped by {number.name} while starting\n"
    assert not list(tmp_path.iterdir())


def test_port_in_use_is_told_before_the_engine_starts():
    """With the address and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command("serve", "--port", str(port))
    assert result.returncode == 2
    assert f"127.0.0.1:{port} is already in use" in sentence_of(result)


def test_refused_configuration_is_told_by_this_process(run_with_vllm):
    """The token layer's reason reaches standard error, and no engine was started."""
    result = run_with_vllm("serve", "--port", "0", "--pipeline-parallel-size", "3")
    assert result.returncode == 1
    assert "pipeline_parallel_size=3" in sentence_of(result)
    assert "EngineCore" not in result.stderr + result.stdout


def test_missing_model_is_one_sentence(run_with_vllm, tmp_path):
    """vLLM's refusal, without its traceback."""
    result = run_with_vllm("serve", str(tmp_path / "none"), "--port", "0")
    assert result.returncode == 1
    assert "vLLM cannot serve this" in sentence_of(result)


def test_unknown_flag_of_vllm_is_told_by_its_own_parser(run_with_vllm):
    """vLLM's argparse error passes through, exit code 2."""
    result = run_with_vllm("serve", "--no-such-flag")
    assert result.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in result.stderr
    assert "Traceback" not in result.stderr
