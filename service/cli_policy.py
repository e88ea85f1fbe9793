"""``vtoken-serve policy get|set|rollback|history``: the policy document of a running service."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.cli_client import (
    EXIT_CODES,
    Client,
    CommandParser,
    RefusedError,
    add_connection,
    print_json,
)
from service.errors import UsageError
from service.strict import RepeatedError, members
from service.text import printable
from vtoken.config import unknown_field_hint
from vtoken.history import APPLY_TO

_SET_HELP = """\
Change fields of the policy document; running requests follow at their next step. A value is JSON
or, where it is none, text; null resets a field to its default:

  vtoken-serve policy set policy=h2o budget_tokens=512
  vtoken-serve policy set keep_ratio=0.5 --dry-run
  vtoken-serve policy set theta_f=null --if-version 3

--dry-run prints what would change, for every running request, and changes nothing.
"""


def main(argv: Sequence[str]) -> int:
    """Run one of the four; returns 0.

    Raises:
        UsageError: the command line is wrong.
        CallError: the service cannot be reached or refuses; the class has the exit code.
    """
    options = _parser().parse_args(list(argv))
    with Client(options) as client:
        reply, text = options.run(client, options)
    if options.json:
        print_json(reply)
    else:
        print("\n".join(map(printable, text)))
    return 0


_Result = tuple[dict[str, Any], Iterable[str]]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="vtoken-serve policy",
        description="Read or change the policy document of a running service.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="get|set|rollback|history")
    get = _add(commands, "get", _get, "Print the document, or some fields of it.")
    get.add_argument("fields", nargs="*", metavar="FIELD", help="only these")
    change = _add(commands, "set", _set, _SET_HELP)
    change.add_argument("changes", nargs="+", metavar="FIELD=VALUE")
    _add_change_options(change)
    back = _add(
        commands, "rollback", _rollback, "Put the values of an earlier version in force again."
    )
    back.add_argument("version", nargs="?", type=int, help="default: the one before")
    _add_change_options(back)
    history = _add(commands, "history", _history, "Print who changed what, the newest first.")
    history.add_argument("--limit", type=int, default=20, metavar="N", help="default: 20")
    return parser


def _add(commands: Any, name: str, run: Any, description: str) -> CommandParser:
    parser: CommandParser = commands.add_parser(
        name,
        description=description,
        help=description.partition(";")[0].partition(".")[0],
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_connection(parser)
    return parser


def _add_change_options(parser: CommandParser) -> None:
    parser.add_argument("--if-version", type=int, metavar="N", help="only if it is still this one")
    parser.add_argument("--dry-run", action="store_true", help="say what would change")
    parser.add_argument(
        "--apply-to", choices=APPLY_TO, default="running", help="default: running and new requests"
    )
    parser.add_argument("--note", metavar="TEXT", help="for the history")


def _get(client: Client, options: argparse.Namespace) -> _Result:
    reply = client.admin("GET", "/admin/policy")
    document = reply["document"]
    for name in options.fields:
        if name not in document:
            raise UsageError(f"no field {name!r}: {unknown_field_hint(name, set(document))}")
    if not options.fields:
        head = [f"# version {reply['version']}"]
        return reply, head + [f"{name}={_text(value)}" for name, value in document.items()]
    reply["document"] = {name: document[name] for name in options.fields}
    return reply, [f"{name}={_text(value)}" for name, value in reply["document"].items()]


def _set(client: Client, options: argparse.Namespace) -> _Result:
    changes = parse_changes(options.changes)
    reply = client.admin(
        "PATCH", "/admin/policy", json=changes, params=_params(options), headers=_if_match(options)
    )
    return reply, _changed(reply)


def _rollback(client: Client, options: argparse.Namespace) -> _Result:
    body = {} if options.version is None else {"version": options.version}
    reply = client.admin(
        "POST",
        "/admin/policy/rollback",
        json=body,
        params=_params(options),
        headers=_if_match(options),
    )
    return reply, _changed(reply)


def _history(client: Client, options: argparse.Namespace) -> _Result:
    reply = client.admin("GET", "/admin/policy/history")
    reply["history"] = reply["history"][: max(0, options.limit)]
    return reply, [line for entry in reply["history"] for line in _entry(entry)]


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """The merge patch in ``name=value`` words.

    Raises:
        UsageError: a word has no ``=``, or a name stands twice, there or in a value. Unknown names
            are the service's to refuse: it may be of another version.
    """
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{pair!r} is not FIELD=VALUE")
        if name in changes:
            raise UsageError(f"{name} is given twice")
        changes[name] = _value(text)
    return changes


def _value(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=members, parse_constant=_refuse)
    except RepeatedError as error:
        raise UsageError(f"{error} in {text}") from error
    except ValueError:
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _params(options: argparse.Namespace) -> dict[str, str]:
    found = {"dry_run": "true"} if options.dry_run else {}
    if options.apply_to != "running":
        found["apply_to"] = options.apply_to
    return {**found, "note": options.note} if options.note is not None else found


def _if_match(options: argparse.Namespace) -> dict[str, str]:
    return {} if options.if_version is None else {"If-Match": f'"{options.if_version}"'}


def _changed(reply: Mapping[str, Any]) -> list[str]:
    if "changes" not in reply:
        raise RefusedError("the service did not say what changed: is it of this version?")
    is_preview = reply.get("dry_run", False)
    head = "nothing was changed; this would be" if is_preview else f"version {reply['version']}"
    text = [f"{head}:", *(_difference(*item) for item in reply["changes"].items())]
    if not reply["changes"]:
        text = [f"{head}: no field differs"]
    text += [f"warning: {warning}" for warning in reply.get("warnings", ())]
    if is_preview:
        totals = reply["totals"]
        blocks = "unknown" if totals["freed_blocks"] is None else totals["freed_blocks"]
        text.append(
            f"{len(reply['requests'])} running requests would lose {totals['evicted_tokens']} "
            f"tokens at once; blocks freed by that without repacking: {blocks}"
        )
        text += [_preview(request) for request in reply["requests"]]
    return text


def _preview(request: Mapping[str, Any]) -> str:
    return (
        f"  {request['request_id']}: {request['policy']}, {request['live_tokens']} live, "
        f"{request['evicted_tokens']} to go, {request['next_eviction']}"
    )


def _entry(entry: Mapping[str, Any]) -> list[str]:
    remarks = [entry["action"]]
    if entry.get("rolled_back_to") is not None:
        remarks.append(f"to version {entry['rolled_back_to']}")
    if entry.get("apply_to") == "new":
        remarks.append("for new requests")
    head = f"{entry['version']:>4}  {entry['at']}  {entry['by']}  {' '.join(remarks)}"
    note = [f"      note: {entry['note']}"] if entry.get("note") else []
    changes = [f"    {_difference(*item)}" for item in entry["changes"].items()]
    return [head, *note, *changes]


def _difference(name: str, values: Mapping[str, Any]) -> str:
    return f"  {name}: {_text(values['from'])} → {_text(values['to'])}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
