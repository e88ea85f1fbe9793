"""The command line: ``python -m loadtest SCENARIO [options]``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest import plots, report, scenarios
from loadtest.bench import Bench
from loadtest.client import ServiceError
from loadtest.fleet import Fleet
from loadtest.machine import load_average
from loadtest.probe import POLL_SECONDS
from loadtest.server import StartError

DEFAULT_OUT = Path("loadtest-results")
PROGRAM = "scripts/loadtest"

_NAMED_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}:\s+(\S.*)")

logger = logging.getLogger("loadtest")


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("scenario", nargs="+", choices=[*scenarios.NAMES, "all"])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes instead of hours")
    size.add_argument("--smoke", action="store_true", help="does it run? the numbers say nothing")
    parser.add_argument("--repeats", type=int, default=0, help="of each arm, after one warm-up")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="another value in the scenario's size, as in --set 'lengths=[8, 512, 64]'",
    )
    parser.add_argument(
        "--poll-seconds",
        type=float,
        default=POLL_SECONDS,
        help="between two looks at the engine; shorter for a model whose steps are short",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the results")
    parser.add_argument("--model", default="", help="folder or name; default: the embedded model")
    parser.add_argument(
        "--share-modes",
        action="store_true",
        help="naive and lazy take turns on one service: fewer starts, fine for counts of blocks",
    )
    parser.add_argument("--url", default="", help="measure this service instead of starting any")
    parser.add_argument(
        "--admin-key-file", type=Path, help="file with an admin key of the service at --url"
    )
    parser.add_argument(
        "--api-key-file", type=Path, help="file with an API key of the service at --url"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios; 0 if all were measured, 1 if one failed, 143 if ended by SIGTERM."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.repeats < 0:
        parser.error("--repeats must be at least 1")
    if arguments.poll_seconds <= 0:
        parser.error("--poll-seconds must be above 0")
    try:
        arguments.set = parse_overrides(arguments.set)
        arguments.keys = {
            "admin_key": read_key(arguments.admin_key_file),
            "api_key": read_key(arguments.api_key_file),
        }
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    names = list(scenarios.NAMES) if "all" in arguments.scenario else arguments.scenario
    try:
        return asyncio.run(_run_all(names, arguments))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """``["a=1"]`` as ``{"a": 1}``.

    Raises:
        ValueError: one has not the form ``NAME=JSON``.
    """
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"--set {text}: must be NAME=JSON") from error
    return found


def read_key(path: Path | None) -> str:
    """The first key of a key file as the service has it: one per line, ``name: key`` or a bare key,
    with blank lines and ``#`` comments. Empty without a file.

    Raises:
        ValueError: the file cannot be read or has no key.
    """
    if path is None:
        return ""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    for line in lines:
        if line and not line.startswith("#"):
            named = _NAMED_KEY.fullmatch(line)
            return named[1] if named else line
    raise ValueError(f"{path}: has no key")


async def _run_all(names: Sequence[str], arguments: argparse.Namespace) -> int:
    size = "quick" if arguments.quick else "smoke" if arguments.smoke else "full"
    exit_code = 0
    _end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="loadtest-") as logs:
        fleet = Fleet(
            Path(logs),
            model=arguments.model,
            share_modes=arguments.share_modes or size == "smoke",
            keep_services=size == "smoke",
            url=arguments.url,
            **arguments.keys,
        )
        async with fleet:
            for name in names:
                try:
                    await run_one(bench_of(fleet, size, arguments), name, arguments.out)
                except (StartError, ServiceError, RuntimeError, ValueError, OSError) as error:
                    logger.exception("%s failed: %s", name, error)
                    exit_code = 1
                await fleet.release()
    return exit_code


def _end_on_sigterm() -> None:
    """Cancel this task on SIGTERM, so that services are ended on the way out, as on Ctrl-C.

    A second SIGTERM changes nothing: it would cut the way out short and leave services behind.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)


def bench_of(fleet: Fleet, size: str, arguments: argparse.Namespace) -> Bench:
    """A bench for one scenario."""
    name = Path(arguments.model).name
    bench = Bench(
        fleet,
        arguments.repeats,
        size,
        poll_seconds=arguments.poll_seconds,
        overrides=arguments.set,
        model=name,
    )
    if arguments.share_modes:
        bench.notes.append("naive and lazy took turns on one service (--share-modes).")
    return bench


async def run_one(bench: Bench, name: str, out: Path) -> dict[str, Any]:
    """Run one scenario and write its files; the result as in the JSON.

    Raises:
        Exception: the scenario's own; what it had measured is written all the same.
        CancelledError: likewise, when the run is ended.
    """
    module = scenarios.load(name)
    before, started = load_average(), time.monotonic()
    error: BaseException | None = None
    try:
        outcome = await module.run(bench)
    except (Exception, asyncio.CancelledError) as caught:  # hours of samples are kept
        if bench.outcome is None or not bench.outcome.arms:
            raise
        outcome, error = bench.outcome, caught
        reason = str(caught) or type(caught).__name__
        bench.notes.append(f"ended early, what was there is here: {reason}")
    outcome.config = {"model": bench.model or "embedded (SmolLM2-135M, bf16)", **outcome.config}
    if bench.fleet.url:
        outcome.config |= {"model": "of the service at --url", "engine": "the service at --url"}
    result = report.build(
        name,
        outcome,
        command=command_of(name, bench),
        size=bench.size,
        load={
            "before": before,
            "after": load_average(),
            "minutes": round((time.monotonic() - started) / 60, 1),
        },
        notes=[*bench.notes, *(f"failed: {reason}" for reason in bench.failures)],
    )
    path = report.write(result, out)
    plots.draw(result, getattr(module, "PLOTS", ()), out)
    print(f"\n{report.table(result)}\n\n{report.comparison_table(result)}\n\n{path}", flush=True)
    if error is not None:
        raise error
    return result


def command_of(name: str, bench: Bench) -> str:
    """The command line that repeats a scenario."""
    options = [f"--{bench.size}"] if bench.size != "full" else []
    options += [f"--repeats {bench.repeats}"] if bench.repeats else []
    options += [f"--set '{key}={json.dumps(value)}'" for key, value in bench.overrides.items()]
    options += [f"--model {bench.model}"] if bench.model else []
    options += [f"--url {bench.fleet.url}"] if bench.fleet.url else []
    options += ["--share-modes"] if bench.fleet.share_modes and bench.size != "smoke" else []
    options += [f"--poll-seconds {bench.poll_seconds:g}"] * (bench.poll_seconds != POLL_SECONDS)
    return " ".join([PROGRAM, name, *options])
