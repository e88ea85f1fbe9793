"""The command of every document that is generated: write it, or check that it is not stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(program: str, render: Callable[[], str], argv: Sequence[str] | None) -> int:
    """``--write FILE`` or ``--check FILE``.

    Args:
        program: as it is called, for messages.
        render: makes the whole document.
        argv: arguments; None takes the process's.

    Returns:
        The exit code: 1 if the file that was checked is stale or absent.
    """
    parser = argparse.ArgumentParser(prog=program)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.write:
        options.write.write_text(render(), encoding="utf-8")
        return 0
    if options.check.is_file() and options.check.read_text(encoding="utf-8") == render():
        return 0
    print(f"{options.check} is stale: {program} --write {options.check}", file=sys.stderr)
    return 1
