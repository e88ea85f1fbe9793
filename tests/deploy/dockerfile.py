"""Reads the Dockerfile, and executes a stage's steps in a folder in place of an image.

Absolute paths of the image are rewritten into the folder. There is no isolation: only stages
without system packages or users are meant to be executed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

IMAGE_PATHS = ("/src", "/wheels", "/opt/vtoken", "/cache", "/home/vtoken", "/tmp/numba")


@dataclass(frozen=True)
class Stage:
    """One ``FROM … AS name`` with its instructions in order, continuation lines joined."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """The arguments of each step of one kind."""
        return [rest for word, rest in self.steps if word == instruction]

    def environment(self) -> dict[str, str]:
        """The stage's ``ENV``, and those ``ARG`` that have a default."""
        pairs = [part for rest in self.all("ENV") for part in shlex.split(rest)]
        pairs += [rest for rest in self.all("ARG") if "=" in rest]
        return dict(pair.split("=", 1) for pair in pairs)


def read(path: Path) -> dict[str, Stage]:
    """The stages by name."""
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for word, rest in _instructions(path.read_text(encoding="utf-8")):
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            current = stages[name] = Stage(name, base)
        elif current is not None:
            current.steps.append((word, rest))
    return stages


def execute(stage: Stage, context: Path, roots: dict[str, Path], *, python_dir: Path) -> None:
    """Run the stage's COPY and RUN steps.

    Args:
        context: the build context, for COPY without ``--from``.
        roots: stage name to the folder that stands for its file system; this stage's is made.
        python_dir: comes first in PATH, so that ``python`` is there.

    Raises:
        subprocess.CalledProcessError: a step failed; its output is in the exception.
    """
    root = roots[stage.name]
    cwd = root / "src"
    cwd.mkdir(parents=True, exist_ok=True)
    path = f"{python_dir}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(root), **stage.environment()}
    for word, rest in stage.steps:
        if word == "COPY":
            _copy(rest, context, roots, cwd)
        elif word == "RUN":
            command = ["bash", "-euo", "pipefail", "-c", inside(root, rest)]
            subprocess.run(
                command, cwd=cwd, env=environment, check=True, capture_output=True, text=True
            )


def inside(root: Path, text: str) -> str:
    """The text with the image's absolute paths led into ``root``."""
    pattern = "|".join(map(re.escape, IMAGE_PATHS))
    return re.sub(rf"(?<![\w/.])({pattern})(?![\w-])", rf"{root}\1", text)


def _copy(rest: str, context: Path, roots: dict[str, Path], cwd: Path) -> None:
    *sources, target = shlex.split(rest)
    base = context
    if sources[0].startswith("--from="):
        base = roots[sources.pop(0).removeprefix("--from=")]
    destination = cwd / target
    for source in sources:
        origin = base / source.lstrip("/")
        if origin.is_dir():
            shutil.copytree(origin, destination, dirs_exist_ok=True)
        else:
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, destination)


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]
