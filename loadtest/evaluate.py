"""The whole evaluation, or its headline: ``python -m loadtest.evaluate [--quick]``.

``--quick``, made for ten minutes on a quiet machine with two cores, measures what the paper is
about: blocks held with and without repacking, and how many requests run at once in a tight pool,
with page-wise eviction beside both. ``naive`` and ``lazy`` take turns on one service, since counts
of blocks and steps do not mind. Without it, every scenario runs at full size: a night.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import cli, report, scenarios

QUICK = ("paired", "frontier")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios and write ``summary.md``; the exit code of the load test."""
    parser = argparse.ArgumentParser(prog="scripts/evaluate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the headline, in ten minutes")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--out", type=Path, default=cli.DEFAULT_OUT)
    parser.add_argument("--model", default="")
    arguments = parser.parse_args(argv)
    names = QUICK if arguments.quick else scenarios.NAMES
    options = ["--out", str(arguments.out), "--model", arguments.model]
    options += ["--repeats", str(arguments.repeats)]
    for flag in ("quick", "smoke"):
        options += [f"--{flag}"] if getattr(arguments, flag) else []
    options += ["--share-modes"] if arguments.quick else []
    started = time.time()
    exit_code = cli.main([*names, *options])
    found = [arguments.out / f"{name}.json" for name in names]
    results = [json.loads(path.read_text()) for path in found if is_newer(path, started)]
    summary = summarize(results)
    (arguments.out / "summary.md").write_text(summary)
    print(summary, flush=True)
    return exit_code


def is_newer(path: Path, started: float) -> bool:
    """Whether a file was written since (to the second): an earlier evaluation may have left one."""
    return path.exists() and path.stat().st_mtime >= int(started)


def summarize(results: Sequence[Mapping[str, Any]]) -> str:
    """Every scenario's comparisons beside what the paper reports, as Markdown."""
    parts = ["# Evaluation"]
    for result in results:
        parts += [f"## {result['scenario']}"]
        if paper := result["details"].get("paper"):
            parts += [f"Paper: {paper}."]
        parts += filter(None, [report.comparison_table(result) or report.table(result)])
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
