"""``vtoken-serve status``: health, pool, policy and requests on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.cli_client import CallError, Client, KeyRefusedError, make_parser, print_json
from service.text import printable

DESCRIPTION = "Show whether a running service is healthy, how full its pool is, and its policy."


def main(argv: Sequence[str]) -> int:
    """Print the state; returns 0 if the service is ready, else 1.

    Raises:
        CallError: it cannot be reached, or refuses the key that it was sent.
    """
    options = make_parser("status", DESCRIPTION).parse_args(list(argv))
    with Client(options) as client:
        found = read(client)
    if options.json:
        print_json(found)
    else:
        print("\n".join(map(printable, lines(found))))
    return 0 if found["ready"] else 1


def read(client: Client) -> dict[str, Any]:
    """``url``, ``ready``, ``health`` and, with an admin key, ``policy`` and ``state``.

    Raises:
        CallError: see :func:`main`.
    """
    health = client.get("/health/ready")
    ready = health.status == 200
    body = health.body if isinstance(health.body, dict) else {}
    found: dict[str, Any] = {"url": client.url, "ready": ready, "health": body}
    if not client.has_key:
        return found
    try:
        found["policy"] = client.admin("GET", "/admin/policy")
        found["state"] = client.admin("GET", "/admin/state")
    except KeyRefusedError:
        raise
    except CallError as error:
        found["problem"] = str(error)  # a sick service is still worth a screen
        found["ready"] = False
    return found


def lines(found: Mapping[str, Any]) -> list[str]:
    """The screen."""
    head = "ready" if found["ready"] else "NOT READY"
    text = [f"{found['url']}  {head}"]
    health = found["health"]
    for name in ("reasons", "degraded"):
        text += [f"  {one['code']}: {one['message']}" for one in health.get(name, ())]
    if problem := found.get("problem"):
        text.append(f"  {problem}")
    if "policy" in found:
        text += _table(_rows(found["policy"], found.get("state")))
    elif "problem" not in found:
        text.append("set VTOKEN_ADMIN_KEY or give --admin-key-file to see pool and policy")
    return text


def _rows(policy: Mapping[str, Any], state: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    document = policy["document"]
    yield "policy", f"{document['policy']}, {budget(document)}, version {policy['version']}"
    yield "mode", f"{policy['mode']}, {_theta(document)}"
    if state is None:
        return
    pool, engine = state["pool"], state["engine"]
    yield "waste", f"F {pool['waste_ratio']:.2f}, θ_F in force {pool['effective_theta_f']:.2f}"
    yield (
        "blocks",
        f"{pool['retained_blocks']} retained, {pool['ideal_blocks']} ideal, "
        f"{pool['free_blocks']} free of {pool['total_blocks']}",
    )
    yield "tokens", f"{pool['live_tokens']} live, {pool['dead_tokens']} evicted"
    yield "requests", f"{engine['running']} running, {engine['waiting']} waiting"
    yield "relocation", _relocation(state)


def _relocation(state: Mapping[str, Any]) -> str:
    if reason := state.get("relocation_disabled"):
        return f"DISABLED: {reason}"
    skips = sorted(state.get("skips", {}).items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {count:g}" for name, count in skips[:4] if count)
    flight = f"{state['pool']['in_flight_relocations']} in flight"
    return f"{flight}; looked in vain: {told}" if told else flight


def budget(document: Mapping[str, Any]) -> str:
    """The budget in words."""
    if document.get("keep_ratio") is not None:
        return f"keeps {document['keep_ratio']:g} of a request"
    return f"keeps {document['budget_tokens']} tokens of a request"


def _theta(document: Mapping[str, Any]) -> str:
    if document["theta_f_mode"] == "adaptive":
        return f"θ_F {document['theta_f_min']:g} to {document['theta_f_max']:g}, adaptive"
    return f"θ_F {document['theta_f']:g}"


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{value}" for name, value in rows]
