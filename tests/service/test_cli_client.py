"""The commands for a running service, over real HTTP and the engine's own operations."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service import auth_access, cli, cli_top
from service.auth_access import AccessRules
from service.auth_keys import KeyRing
from service.cli_client import Client, make_parser
from tests.core_models import make_request
from tests.service.conftest import ADMIN_KEY
from tests.service.ui_server import PoolEngine, UiServer


@pytest.fixture
def engine() -> PoolEngine:
    engine = PoolEngine()
    engine.fill()
    return engine


@pytest.fixture
def server(engine: PoolEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[UiServer]:
    """A service that the environment names, with its key."""
    server = UiServer(engine)
    monkeypatch.setenv("VTOKEN_URL", server.root)
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", ADMIN_KEY)
    yield server
    server.stop()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_status_is_one_screen(server, engine, capsys):
    """Health, policy, F, blocks and requests, each with the engine's numbers."""
    code, out, err = run(capsys, "status")
    assert (code, err) == (0, "")
    pool = engine.layer.pool_state()
    assert out.splitlines()[0] == f"{server.root}  ready"
    assert "policy      none, keeps 1024 tokens of a request, version 1" in out
    assert f"F {pool['waste_ratio']:.2f}" in out
    assert f"{pool['retained_blocks']} retained, {pool['ideal_blocks']} ideal" in out
    assert "3 running, 0 waiting" in out
    assert len(out.splitlines()) <= 24


def test_status_as_json(server, capsys):
    """Everything that the screen is made from."""
    found = json.loads(run(capsys, "status", "--json")[1])
    assert found["ready"] is True
    assert found["policy"]["version"] == 1
    assert found["state"]["engine"]["running"] == 3


def test_status_without_key_tells_health_alone(server, capsys, monkeypatch):
    """And how to see more."""
    monkeypatch.delenv("VTOKEN_ADMIN_KEY")
    code, out, _ = run(capsys, "status")
    assert code == 0
    assert "VTOKEN_ADMIN_KEY" in out
    assert "policy" not in out.replace("pool and policy", "")


def test_status_of_a_sick_service_is_1(server, engine, capsys):
    """The reason is on the screen."""
    engine.is_dead = True
    code, out, _ = run(capsys, "status")
    assert code == 1
    assert "NOT READY" in out
    assert "the engine is dead" in out


def test_policy_get_prints_what_set_takes(server, capsys):
    """Each line of one is an argument of the other."""
    code, out, _ = run(capsys, "policy", "get")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "# version 1")
    assert "theta_f=0.0" in lines
    code, out, err = run(capsys, "policy", "set", *lines[1:])
    assert (code, err) == (0, "")
    assert "no field differs" in out
    assert run(capsys, "policy", "get", "policy", "theta_f")[1] == "policy=none\ntheta_f=0.0\n"
    assert json.loads(run(capsys, "policy", "get", "theta_f", "--json")[1])["document"] == {
        "theta_f": 0.0
    }


def test_policy_set_rollback_history(server, engine, capsys):
    """A change, what it was, and back."""
    code, out, _ = run(capsys, "policy", "set", "theta-f=0.4", "policy=random", "--note", "evening")
    assert code == 0
    assert out.startswith("version 2:")
    assert "theta_f: 0.0 → 0.4" in out
    assert (engine.layer.config.theta_f, engine.layer.config.policy) == (0.4, "random")
    code, out, _ = run(capsys, "policy", "rollback")
    assert code == 0
    assert engine.layer.config.theta_f == 0.0
    code, out, _ = run(capsys, "policy", "history")
    assert [line.split()[0] for line in out.splitlines() if re.match(r" +\d", line)] == [*"321"]
    assert "note: evening" in out
    assert "admin-1" in out
    limited = json.loads(run(capsys, "policy", "history", "--limit", "1", "--json")[1])
    assert [entry["version"] for entry in limited["history"]] == [3]


def test_dry_run_changes_nothing(server, engine, capsys):
    """It says so, and what each running request would lose."""
    code, out, _ = run(capsys, "policy", "set", "policy=random", "budget_tokens=128", "--dry-run")
    assert code == 0
    assert out.startswith("nothing was changed")
    assert "3 running requests would lose" in out
    assert "  whole: random, 400 live, 272 to go" in out
    assert engine.layer.policy_version == 1


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["policy", "set", "theta_f=0.1", "--if-version", "7"], 4, "policy is at version 1"),
        (["policy", "set", "theta_f=1.5"], 2, "0 <= theta_f < 1"),
        (["policy", "set", "theta=1"], 2, "did you mean 'theta_f'?"),
        (["policy", "set", "theta_f"], 2, "'theta_f' is not FIELD=VALUE"),
        (["policy", "set", "theta_f=0.1", "theta_f=0.2"], 2, "theta_f is given twice"),
        (["policy", "set", 'policy_args={"a": 1, "a": 2}'], 2, "'a' is given twice in"),
        (["policy", "set"], 2, "see vtoken-serve policy set --help"),
        (["policy", "get", "theta"], 2, "did you mean 'theta_f'?"),
        (["policy", "rollback", "9"], 2, "version"),
        (["policy"], 2, "get|set|rollback|history"),
        (["top", "--interval", "0"], 2, "--interval"),
        (["status", "--url", "localhost:8000"], 2, "must begin with http://"),
        (["status", "--timeout", "0"], 2, "--timeout"),
        (["status", "--admin-key-file", "/nowhere"], 2, "/nowhere"),
    ],
)
def test_mistakes_are_one_sentence(server, engine, capsys, arguments, code, sentence):
    """With its exit code; nothing was changed."""
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (code, "")
    assert err.startswith("vtoken-serve: ")
    assert len(err.splitlines()) == 1
    assert sentence in err
    assert engine.layer.policy_version == 1


@pytest.mark.parametrize("command", [["status"], ["policy", "get"], ["top", "--once"]])
def test_wrong_key_is_3(server, capsys, monkeypatch, command):
    """As is a service whose admin routes are closed."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", "wrong")
    code, _, err = run(capsys, *command)
    assert code == 3
    assert "admin key" in err


def test_missing_key_is_told_with_the_way_out(server, capsys, monkeypatch):
    """Both ways to give one are named."""
    monkeypatch.delenv("VTOKEN_ADMIN_KEY")
    code, _, err = run(capsys, "policy", "get")
    assert code == 3
    assert "VTOKEN_ADMIN_KEY or give --admin-key-file" in err


def test_key_file_beats_the_variable(server, capsys, monkeypatch, tmp_path):
    """Its first key is sent, named or not; VTOKEN_ADMIN_KEY_FILE does for want of a key."""
    file = tmp_path / "keys"
    file.write_text(f"# comment\nalice: {ADMIN_KEY}\nbob: other\n")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", "wrong")
    assert run(capsys, "policy", "get", "--admin-key-file", str(file))[0] == 0
    monkeypatch.delenv("VTOKEN_ADMIN_KEY")
    monkeypatch.setenv("VTOKEN_ADMIN_KEY_FILE", str(file))
    assert run(capsys, "policy", "get")[0] == 0


@pytest.mark.parametrize("command", [["status"], ["policy", "get"], ["top", "--once"]])
def test_unreachable_service_is_1(capsys, monkeypatch, command):
    """The address is in the sentence."""
    monkeypatch.setenv("VTOKEN_ADMIN_KEY", ADMIN_KEY)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, _, err = run(capsys, *command, "--url", url)
    assert code == 1
    assert f"cannot reach {url}" in err


def test_hung_service_is_1(capsys):
    """After the timeout that was given."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = run(capsys, "status", "--url", url, "--timeout", "0.2")
    assert code == 1
    assert "within the timeout" in err


def test_another_server_is_recognised(server, capsys):
    """Something answers, but not this program."""
    code, _, err = run(capsys, "policy", "get", "--url", server.root + "/elsewhere")
    assert code == 1
    assert "is it vtoken-serve" in err


def test_admin_routes_may_be_elsewhere(server, capsys):
    """--admin-url; health is asked at --url."""
    elsewhere = server.root + "/elsewhere"
    code, out, _ = run(capsys, "status", "--url", elsewhere, "--admin-url", server.root)
    assert code == 1  # no health there
    assert "3 running" in out


def test_top_prints_plain_frames_where_there_is_no_terminal(server, engine, capsys):
    """One with --once: no control characters, the requests by retained blocks."""
    code, out, _ = run(capsys, "top", "--once", "--interval", "0.1")
    assert code == 0
    assert "\x1b" not in out
    assert [line.split()[-1] for line in out.splitlines()[-4:-1]] == ["half", "sparse", "whole"]
    assert f"F {engine.layer.occupancy.waste_ratio:.2f}" in out
    frame = json.loads(run(capsys, "top", "--once", "--interval", "0.1", "--json")[1])
    assert frame["rates_per_second"].keys() == cli_top.RATES.keys()


def test_nothing_that_others_wrote_moves_the_cursor(server, engine, capsys):
    """Neither the note of another admin nor the id that a client gave its request."""
    assert run(capsys, "policy", "set", "theta_f=0.4", "--note", "a\x1b[2J\nb")[0] == 0
    assert r"note: a\x1b[2J\nb" in run(capsys, "policy", "history")[1]
    make_request(engine.layer, engine.pool, "id\x1b[31m\rforged", num_tokens=100)
    for command in (["top", "--once", "--interval", "0.1"], ["policy", "set", "theta_f=0.1"]):
        out = run(capsys, *command, *(["--dry-run"] if command[0] == "policy" else []))[1]
        assert r"id\x1b[31m\rforged" in out
        assert "\x1b" not in out


def test_top_sends_the_key_that_metrics_may_need(server, engine, capsys):
    """The admin key opens them; without it there would be nothing but zeros."""
    guard = server.app.state.vtoken.guard
    rules = AccessRules(guard, KeyRing.of("api", {"alice": "k"}), metrics_key_required=True)
    auth_access.install(server.app, rules)
    assert httpx.get(server.root + "/metrics").status_code == 401
    engine.layer.stats.inc("evicted_tokens_total", 7, "none")
    with Client(make_parser("top", "").parse_args([])) as client:
        assert cli_top.look(client, None).counters["vtoken_evicted_tokens_total"] >= 7
    code, _, err = run(capsys, "top", "--once", "--interval", "0.1")
    assert (code, err) == (0, "")


def test_top_without_metrics_fails(server, capsys):
    """Rates that nobody measured are not shown as zero."""
    server.app.router.routes[:] = [r for r in server.app.routes if r.path != "/metrics"]
    code, out, err = run(capsys, "top", "--once", "--interval", "0.1")
    assert (code, out) == (1, "")
    assert "no such route" in err


class Terminal(io.StringIO):
    """A place to write to that says that it is a screen."""

    def isatty(self) -> bool:
        return True


def test_top_redraws_in_place_on_a_terminal(server):
    """The screen is given back at Ctrl-C, and a lost service is told while it lasts."""

    def leave() -> None:
        raise KeyboardInterrupt

    out, events = Terminal(), iter([lambda: None, server.stop, server.start, leave])
    assert cli_top.main(["--interval", "1"], out, lambda _: next(events)()) == 0
    text = out.getvalue()
    assert text.startswith("\x1b[?1049h")
    assert text.endswith("\x1b[?1049l")
    frames = text.split("\x1b[H\x1b[J")[1:]
    assert ["trying again" in frame for frame in frames] == [False, True, False]
    assert all(len(line) <= 80 for frame in frames for line in frame.split("\x1b")[0].splitlines())


def test_rates_are_differences_over_time():
    """A counter that fell began again at zero."""
    names = list(cli_top.RATES.values())
    before = cli_top.Frame(10, {}, dict.fromkeys(names, 5.0), {})
    after = cli_top.Frame(12, {}, {**dict.fromkeys(names, 9.0), names[0]: 3.0}, {})
    rates = cli_top.rates(before, after)
    assert rates.pop(next(iter(cli_top.RATES))) == 1.5
    assert set(rates.values()) == {2.0}


def test_counters_are_sums_over_labels():
    """Of families that are not there, zero."""
    text = (
        "# TYPE vtoken_evicted_tokens counter\n"
        'vtoken_evicted_tokens_total{policy="a"} 2\nvtoken_evicted_tokens_total{policy="b"} 3\n'
    )
    counters = cli_top.read_counters(text)
    assert counters["vtoken_evicted_tokens_total"] == 5
    assert sum(counters.values()) == 5


def test_frame_fits_the_terminal(server, engine):
    """The last line says how much is not shown."""
    state = engine.ask("state")
    frame = cli_top.Frame(0, state, {}, dict.fromkeys(cli_top.RATES, 0.0))
    assert len(cli_top.lines("http://x", frame, None)) == 9
    cut = cli_top.lines("http://x", frame, 8)
    assert len(cut) == 8
    assert cut[-1] == "… and 2 more"


@pytest.mark.parametrize("command", ["status", "policy", "top", "size"])
def test_commands_do_not_import_vllm(command):
    """Nor torch: they start in a fraction of a second."""
    program = (
        "import sys; from service import cli\n"
        f"try: cli.main([{command!r}, '--help'])\n"
        "except SystemExit as leaving: assert not leaving.code\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules), 'slow'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={n: v for n, v in os.environ.items() if n != "LD_PRELOAD"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: vtoken-serve" in done.stdout
