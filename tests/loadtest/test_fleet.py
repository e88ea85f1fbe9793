"""Which services are started, kept and ended, and what they are told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from loadtest import fleet as fleet_module
from loadtest import server as server_module
from loadtest.bench import abba, wait_idle
from loadtest.client import Client
from loadtest.fleet import (
    DEFAULT_POLL_SECONDS,
    MAX_SERVICES,
    Arm,
    Engine,
    Fleet,
    check_document,
)
from loadtest.scenarios import overhead
from loadtest.server import Server, StartError, flag_list
from service.settings.http_process import ServiceSettings
from tests.loadtest.fake_fleet import FakeFleet
from tests.loadtest.fake_service import KEY

OTHER = Engine(num_blocks=300)


def ask(service, tmp_path: Path, arms: list[Arm], *, share_modes: bool) -> FakeFleet:
    async def run():
        async with FakeFleet(service, tmp_path, share_modes=share_modes) as fleet:
            for arm in arms:
                await fleet.client(arm)
            return fleet

    return asyncio.run(run())


def test_arms_that_differ_in_policy_share_a_service(service, tmp_path):
    """The document is patched: the arm's fields over the service's own defaults."""
    arms = [Arm("a", "naive", {"policy": "random", "keep_ratio": 0.5}), Arm("b", "naive")]
    fleet = ask(service, tmp_path, arms, share_modes=False)
    assert fleet.num_started == 1
    first, second = service.patches
    assert (first["policy"], first["keep_ratio"], first["mode"]) == ("random", 0.5, "naive")
    assert first["budget_tokens"] is None
    assert (second["policy"], second["budget_tokens"]) == ("streaming_llm", 1024)
    assert second["keep_ratio"] is None


def test_an_arm_has_nothing_of_the_arm_before_it(service, tmp_path):
    """A field whose default is nothing is sent as null: left out, it would keep its value."""
    capped = {"policy": "random", "budget_tokens": 256, "max_blocks_per_request": 17}
    arms = [Arm("capped", "lazy", capped), Arm("plain", "lazy", {"policy": "random"})]
    service.document["max_blocks_per_request"] = None
    ask(service, tmp_path, arms, share_modes=True)
    first, second = service.patches
    assert first["max_blocks_per_request"] == 17
    assert second["max_blocks_per_request"] is None
    assert service.document["max_blocks_per_request"] is None


def test_an_arm_is_not_measured_under_another_document():
    """If the service answers with another one, the field and both values are told."""
    with pytest.raises(RuntimeError, match=r"a would .* theta_f: wanted 0.1, is 0.25"):
        check_document("a", {"theta_f": 0.1, "seed": 0}, {"theta_f": 0.25, "seed": 0, "x": 1})


def test_a_service_can_be_asked_without_a_change_of_its_policy(service, tmp_path):
    """It is the one that measures, and who does measure puts the arm's document in force."""

    async def run():
        async with FakeFleet(service, tmp_path) as fleet:
            arm = Arm("a", "lazy", {"theta_f": 0.1})
            client = await fleet.service(arm)
            assert service.patches == []
            assert await fleet.client(arm) is client
            assert fleet.num_started == 1

    asyncio.run(run())
    assert [patch["theta_f"] for patch in service.patches] == [0.1]


@pytest.mark.parametrize(("share_modes", "num_started"), [(False, 2), (True, 1)])
def test_modes_have_services_of_their_own_unless_shared(
    service, tmp_path, share_modes, num_started
):
    """A measurement gives each mode a fresh engine; a smoke run does not."""
    arms = [Arm("a", "naive"), Arm("b", "lazy"), Arm("c", "naive")]
    assert ask(service, tmp_path, arms, share_modes=share_modes).num_started == num_started


def test_other_engines_and_mode_off_are_other_services(service, tmp_path):
    """What is fixed while an engine runs cannot be patched; mode off has no document."""
    arms = [Arm("a", "lazy"), Arm("b", "lazy", engine=OTHER), Arm("c", "off")]
    assert ask(service, tmp_path, arms, share_modes=True).num_started == 3
    assert len(service.patches) == 2


def test_other_modules_are_another_service(service, tmp_path):
    """The same flags with a plugin on the path are not the same engine."""
    engine = Engine(python_path="x")
    arms = [Arm("a", "lazy"), Arm("b", "lazy", engine=engine), Arm("c", "lazy", engine=engine)]
    assert ask(service, tmp_path, arms, share_modes=True).num_started == 2


def test_the_service_not_used_for_longest_is_ended(service, tmp_path):
    """Asking for one too many ends the oldest; asking for that again starts it anew."""
    engines = [Engine(num_blocks=200 + n) for n in range(MAX_SERVICES + 1)]
    arms = [Arm(str(n), "lazy", engine=engine) for n, engine in enumerate(engines)]
    fleet = ask(service, tmp_path, [*arms, arms[-1], arms[0]], share_modes=True)
    assert [arm.name for arm in fleet.arms] == ["0", "1", "2", "3", "4", "0"]


def test_release_ends_all_unless_they_are_kept(service, tmp_path):
    """A smoke run keeps its services for the next scenario."""

    async def run(keep_services: bool) -> int:
        async with FakeFleet(service, tmp_path, keep_services=keep_services) as fleet:
            await fleet.client(Arm("a", "naive"))
            await fleet.release()
            await fleet.client(Arm("a", "naive"))
            return fleet.num_started

    assert asyncio.run(run(False)) == 2
    assert asyncio.run(run(True)) == 1


def test_given_service_is_measured_and_never_started(service, tmp_path):
    """``--url``: every arm is that service, and mode off cannot be had."""

    async def run():
        async with Fleet(tmp_path, url=service.url, admin_key=KEY) as fleet:
            client = await fleet.client(Arm("a", "lazy", {"theta_f": 0.1}))
            assert await fleet.client(Arm("b", "naive")) is client
            assert fleet.num_started == 0
            assert fleet.settle_seconds(Arm("a", "lazy")) > 2
            with pytest.raises(ValueError, match=r"one engine; c needs .*override 300"):
                await fleet.client(Arm("c", "lazy", engine=OTHER))

    asyncio.run(run())
    assert service.patches[0]["theta_f"] == 0.1

    async def run_off():
        async with Fleet(tmp_path, url=service.url, admin_key=KEY) as fleet:
            await fleet.client(Arm("a", "off"))

    with pytest.raises(ValueError, match="mode off"):
        asyncio.run(run_off())


def test_stock_has_larger_blocks_and_the_same_bytes():
    """Its attention takes no blocks of 16."""
    ours, stock = (Engine(num_blocks=200).arguments(mode) for mode in ("lazy", "off"))
    for name, of_ours, of_stock in (
        ("--block-size", "16", "32"),
        ("--num-gpu-blocks-override", "200", "100"),
        ("--vtoken-mode", "lazy", "off"),
    ):
        assert ours[ours.index(name) + 1] == of_ours
        assert stock[stock.index(name) + 1] == of_stock


def test_a_service_as_it_is_reads_its_engine_as_often_as_by_default():
    """What is compared with stock vLLM in speed does not work harder for its metrics."""
    default = ServiceSettings.model_fields["metrics_poll_seconds"].default
    assert default == DEFAULT_POLL_SECONDS
    arguments = overhead.make_engine(overhead.SIZES["full"]).arguments("lazy")
    assert float(arguments[arguments.index("--vtoken-metrics-poll-seconds") + 1]) == default


def test_flags_become_arguments():
    """Switches are on or off, values follow their names."""
    flags = {"enforce-eager": True, "enable-prefix-caching": False, "seed": "0"}
    assert flag_list(flags) == ["--enforce-eager", "--no-enable-prefix-caching", "--seed", "0"]


# -- processes ---------------------------------------------------------------------------------


def make_command(folder: Path, body: str) -> str:
    path = folder / "vtoken-serve"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_server_is_ready_when_it_says_so_and_stops_with_its_children(tmp_path, monkeypatch):
    """The address is read from its output; a child that outlives it is ended too."""
    body = f"""
[ "$1 $2 $3 $4 $VTOKEN_ENGINE_TIMEOUT_SECONDS" = "serve --port 0 --flag 120" ] || exit 3
sleep 1000 & echo $! > {tmp_path}/child
echo "vtoken-serve ready on http://127.0.0.1:1234 (model m, lazy)"
wait"""
    command = make_command(tmp_path, body)
    monkeypatch.setattr(server_module, "console_command", lambda: command)
    server = Server(["--flag"], tmp_path / "log")
    assert server.wait_ready(60) == "http://127.0.0.1:1234"
    child = int((tmp_path / "child").read_text())
    server.stop()
    server.stop()
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_server_looks_for_modules_in_its_own_folder_first(tmp_path, monkeypatch):
    """Before those of the present path, which stay."""
    monkeypatch.setenv("PYTHONPATH", "theirs")
    command = make_command(tmp_path, "echo path=$PYTHONPATH; exit 2")
    monkeypatch.setattr(server_module, "console_command", lambda: command)
    server = Server([], tmp_path / "log", python_path="ours")
    with pytest.raises(StartError, match="path=ours:theirs"):
        server.wait_ready(60)


def test_server_that_ends_says_why(tmp_path, monkeypatch):
    """The error has its exit code and the end of its log."""
    command = make_command(tmp_path, "echo the pool is too small; exit 2")
    monkeypatch.setattr(server_module, "console_command", lambda: command)
    server = Server([], tmp_path / "log")
    with pytest.raises(StartError, match="ended with 2\nthe pool is too small"):
        server.wait_ready(60)


def test_slow_server_is_given_up_and_stopped_by_the_fleet(tmp_path, monkeypatch):
    """Nothing is left of a service that did not become ready."""
    command = make_command(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    monkeypatch.setattr(server_module, "console_command", lambda: command)
    wait_ready = Server.wait_ready

    def impatient(self, seconds=60.0):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        return wait_ready(self, 0.05)

    monkeypatch.setattr(fleet_module.Server, "wait_ready", impatient)

    async def run():
        async with Fleet(tmp_path) as fleet:
            await fleet.client(Arm("slow", "lazy"))

    with pytest.raises(StartError, match="not ready: after 0 s"):
        asyncio.run(run())
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_console_command_is_that_of_this_environment(tmp_path, monkeypatch):
    """Beside the interpreter, else on the path, else a sentence."""
    assert Path(server_module.console_command()).name == "vtoken-serve"
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(server_module.shutil, "which", lambda name: "/elsewhere/" + name)
    assert server_module.console_command() == "/elsewhere/vtoken-serve"
    monkeypatch.setattr(server_module.shutil, "which", lambda name: None)
    with pytest.raises(StartError, match="not installed"):
        server_module.console_command()


# -- order -------------------------------------------------------------------------------------


def test_order_is_abba_after_one_warm_up_each():
    """Linear drift of the machine cancels within two repeats."""
    order = list(abba(["a", "b"], 3))
    assert order[:2] == [(-1, "a"), (-1, "b")]
    assert [name for _, name in order[2:]] == ["a", "b", "b", "a", "a", "b"]
    assert [repeat for repeat, _ in order[2:]] == [0, 0, 1, 1, 2, 2]


def test_waiting_for_an_idle_service_ends_when_it_is(service):
    """Nothing runs in the fake one."""

    async def run():
        async with Client(service.url) as client:
            await wait_idle(client)

    asyncio.run(run())
