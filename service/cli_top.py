"""``vtoken-serve top``: a live view in the terminal, or plain frames where there is none."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from prometheus_client.parser import text_string_to_metric_families

from service.cli_client import CallError, Client, KeyRefusedError, make_parser, print_json
from service.text import printable

DESCRIPTION = """\
Watch a running service: waste, blocks, backpressure, stalls, and the requests that hold most.
On a terminal the view is renewed in place until Ctrl-C; elsewhere frames follow each other."""

RATES: Mapping[str, str] = {
    "generated_tokens": "vllm:generation_tokens_total",
    "evicted_tokens": "vtoken_evicted_tokens_total",
    "freed_blocks": "vtoken_freed_blocks_total",
    "backpressure_seconds": "vtoken_headroom_backpressure_seconds_total",
    "stall_seconds": "vtoken_relocation_stall_seconds_sum",
    "relocations": "vtoken_relocation_stall_seconds_count",
    "preemptions": "vtoken_preemptions_total",
}
"""Rates of a frame, per second, and the counters that they come from."""

_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


@dataclass(frozen=True)
class Frame:
    """One look at the service.

    Attributes:
        at: monotonic seconds.
        state: of ``GET /admin/state``.
        counters: sums over all label sets.
        rates: per second since the look before.
    """

    at: float
    state: Mapping[str, Any]
    counters: Mapping[str, float]
    rates: Mapping[str, float]


def main(
    argv: Sequence[str], out: TextIO | None = None, nap: Callable[[float], None] = time.sleep
) -> int:
    """Watch until Ctrl-C, or for one frame with ``--once``; returns 0.

    Raises:
        CallError: the service cannot be reached at the first look; later failures are shown, and
            the watch goes on.
    """
    options = _options(argv)
    out = out or sys.stdout
    in_place = out.isatty() and not options.once and not options.json
    with Client(options) as client:
        before = look(client, None)
        if in_place:
            out.write(_ENTER)
        try:
            for frame in _frames(client, before, options, nap):
                _show(frame, client.url, options, out, in_place)
        except KeyboardInterrupt:
            pass
        finally:
            if in_place:
                out.write(_LEAVE)
                out.flush()
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("top", DESCRIPTION)
    parser.add_argument("--once", action="store_true", help="one frame, after one interval")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds a frame (default: 2)"
    )
    options = parser.parse_args(list(argv))
    if not 0.1 <= options.interval <= 3600:
        parser.error(f"--interval={options.interval:g}: must be 0.1 to 3600 seconds")
    return options


def _frames(
    client: Client, before: Frame, options: argparse.Namespace, nap: Callable[[float], None]
) -> Iterator[Frame | CallError]:
    """A frame after each interval, or why there is none; once or for ever."""
    while True:
        nap(options.interval)
        try:
            before = look(client, before)
        except KeyRefusedError:
            raise
        except CallError as error:
            if options.once:
                raise
            yield error
            continue
        yield before
        if options.once:
            return


def look(
    client: Client, before: Frame | None, clock: Callable[[], float] = time.monotonic
) -> Frame:
    """Read the service once.

    Raises:
        CallError: it cannot be reached, refuses the key, or has no metrics.
    """
    state = client.admin("GET", "/admin/state")
    frame = Frame(clock(), state, read_counters(client.metrics()), {})
    return frame if before is None else dataclasses.replace(frame, rates=rates(before, frame))


def read_counters(text: str) -> dict[str, float]:
    """The counters behind :data:`RATES`, each summed over its label sets; absent ones are 0."""
    totals = dict.fromkeys(RATES.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return totals


def rates(before: Frame, after: Frame) -> dict[str, float]:
    """Per second; a counter that fell, because the service was restarted, counts from 0."""
    seconds = max(after.at - before.at, 1e-9)
    found = {}
    for name, counter in RATES.items():
        old, new = before.counters[counter], after.counters[counter]
        found[name] = (new - old if new >= old else new) / seconds
    return found


def lines(url: str, frame: Frame, height: int | None) -> list[str]:
    """A frame as text, cut to ``height`` lines where there is a limit."""
    pool, engine, rate = frame.state["pool"], frame.state["engine"], frame.rates
    stall = rate["stall_seconds"] / rate["relocations"] if rate["relocations"] else 0.0
    text = [
        f"vtoken-serve {url}   {time.strftime('%H:%M:%S')}",
        f"F {pool['waste_ratio']:.2f}   θ_F {pool['effective_theta_f']:.2f}   "
        f"blocks {_bar(pool)}  {pool['retained_blocks']} retained, {pool['ideal_blocks']} ideal, "
        f"{pool['free_blocks']} free of {pool['total_blocks']}",
        f"requests {engine['running']} running, {engine['waiting']} waiting   "
        f"tokens/s {rate['generated_tokens']:.0f}   evicted/s {rate['evicted_tokens']:.0f}   "
        f"blocks freed/s {rate['freed_blocks']:.1f}",
        f"backpressure {100 * rate['backpressure_seconds']:.0f} % of the time   "
        f"relocations/s {rate['relocations']:.1f}, stall {1000 * stall:.2f} ms each   "
        f"preemptions/s {rate['preemptions']:.1f}",
    ]
    if reason := frame.state.get("relocation_disabled"):
        text.append(f"RELOCATION DISABLED: {reason}")
    requests = sorted(frame.state["requests"], key=lambda one: -one["retained_blocks"])
    text += ["", _HEAD, *map(_row, requests)]
    if height is not None and len(text) > height:
        hidden = len(text) - height + 1
        text = [*text[: height - 1], f"… and {hidden} more"]
    return text


_HEAD = (
    f"{'RETAINED':>8} {'IDEAL':>6} {'TOKENS':>7} {'LIVE':>7} {'EVICTED':>8}  {'POLICY':<16} REQUEST"
)


def _row(request: Mapping[str, Any]) -> str:
    return (
        f"{request['retained_blocks']:>8} {request['ideal_blocks']:>6} "
        f"{request['num_tokens']:>7} {request['live_tokens']:>7} "
        f"{request['evicted_tokens']:>8}  {request['policy']:<16} {request['request_id']}"
    )


def _bar(pool: Mapping[str, float], width: int = 24) -> str:
    """Live (#), wasted (=) and free (.) shares of the pool."""
    total = max(1.0, pool["total_blocks"])
    used = round(width * min(1.0, (total - pool["free_blocks"]) / total))
    live = min(used, round(width * pool["ideal_blocks"] / total))
    return f"[{'#' * live}{'=' * (used - live)}{'.' * (width - used)}]"


def _show(
    frame: Frame | CallError, url: str, options: argparse.Namespace, out: TextIO, in_place: bool
) -> None:
    size = shutil.get_terminal_size()
    if isinstance(frame, CallError):
        text = [f"trying again: {frame}"]
    elif options.json:
        print_json({"state": frame.state, "rates_per_second": frame.rates})
        return
    else:
        text = lines(url, frame, size.lines - 1 if in_place else None)
    text = [printable(line) for line in text]
    if in_place:
        text = [line[: size.columns] for line in text]
        out.write(_CLEAR + "\n".join(text) + "\n")
    else:
        out.write("\n".join(text) + "\n\n")
    out.flush()
