"""What the documents tell a reader to type can be typed: in a clone, with what the scripts made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from service import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md") for path in ROOT.glob(pattern)
)
IN_PATH_ELSEWHERE = {"venv"}
"""Modules that any Python has."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = {"", "console", "bash", "sh"}
_COMMAND = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S* )*((?:scripts/|python|\S*vtoken-serve\b).*)", re.MULTILINE
)
_WHICH_PYTHON = "shell with [the scripts' environment]"


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command of ours in the document's blocks for a shell.

    Where some lines have a prompt, the others are what was printed.
    """
    for language, block in _BLOCK.findall(path.read_text()):
        if language in _SHELL:
            typed = re.findall(r"^\$ .*", block, re.MULTILINE)
            text = "\n".join(typed) if typed else block
            yield from (command.split() for command in _COMMAND.findall(text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_there(path):
    """``vtoken-serve`` and our Python are on no path but that of the scripts' environment."""
    for name, *rest in commands(path):
        if name.startswith("scripts/"):
            assert (ROOT / name).is_file()
        elif name == "python":
            assert rest[0] == "-m"
            assert find_spec(rest[1]), rest
            has_said = _WHICH_PYTHON in path.read_text()
            assert has_said or rest[1] in IN_PATH_ELSEWHERE, f"{rest}: say in which Python"
        else:
            assert name == ".venv/bin/vtoken-serve", f"{name} {' '.join(rest)}"
            assert rest[0] in {*cli._COMMANDS, "--help", "--version"}, rest


def test_documents_have_commands():
    """Else nothing was checked."""
    found = {name for path in DOCUMENTS for name, *_ in commands(path)}
    assert {"scripts/serve", "scripts/loadtest", ".venv/bin/vtoken-serve", "python"} <= found
