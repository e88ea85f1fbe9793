"""What ``helm test`` runs: one chat, the metrics, and a policy change that is put back.

    python3 smoke.py http://service:80

Standard library only. Reads SMOKE_API_KEY, SMOKE_ADMIN_KEYS (one per line), SMOKE_API_KEYS_DIR and
SMOKE_ADMIN_KEYS_DIR (one key per file) where those are empty, SMOKE_ADMIN_URL if admin has another
port, SMOKE_MODE and SMOKE_TIMEOUT_SECONDS. Exit code 1 with one sentence if anything is not as it
should be.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = float(os.environ.get("SMOKE_TIMEOUT_SECONDS", "120"))

CONNECTIONS: dict[str, http.client.HTTPConnection] = {}
"""Kept open: a Service gives each new one to any pod, and the policy is changed pod by pod."""


class SmokeError(Exception):
    """The service did not answer as it should."""


def call(
    method: str, url: str, key: str, body: object = None, headers: Mapping[str, str] | None = None
) -> str:
    """The text of a successful answer.

    Raises:
        SmokeError: the service cannot be reached or refuses.
    """
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    if key:
        sent["Authorization"] = f"Bearer {key}"
    place = urllib.parse.urlsplit(url)
    if place.netloc not in CONNECTIONS:
        connection = http.client.HTTPConnection(place.netloc, timeout=TIMEOUT_SECONDS)
        CONNECTIONS[place.netloc] = connection
    try:
        CONNECTIONS[place.netloc].request(method, place.path, data, sent)
        answer = CONNECTIONS[place.netloc].getresponse()
        text = answer.read().decode(errors="replace")
    except ValueError:  # its message would show the key
        raise SmokeError(f"{method} {url} was not sent: no header can hold this key") from None
    except (OSError, http.client.HTTPException) as error:
        raise SmokeError(f"{method} {url} failed: {error!r}") from error
    if answer.status >= 300:
        raise SmokeError(f"{method} {url} answered {answer.status}: {text[:500]}")
    return text


def check_chat(base: str, key: str) -> None:
    """The served model answers a chat with at least one token."""
    model = json.loads(call("GET", f"{base}/v1/models", key))["data"][0]["id"]
    message = {"role": "user", "content": "Say hello."}
    body = {"model": model, "messages": [message], "max_tokens": 8}
    reply = json.loads(call("POST", f"{base}/v1/chat/completions", key, body))
    num_tokens = reply["usage"]["completion_tokens"]
    if num_tokens < 1:
        raise SmokeError(f"the chat brought no token: {reply}")
    print(f"chat: {model} answered with {num_tokens} tokens")


def check_metrics(base: str, key: str) -> None:
    """vLLM's metrics and ours are on one page."""
    text = call("GET", f"{base}/metrics", key)
    for name in ("vllm:num_requests_running", "vtoken_policy_info"):
        if f"\n{name}{{" not in text:
            raise SmokeError(f"/metrics has no {name}")
    print("metrics: vllm:* and vtoken_* are there")


def check_policy(base: str, key: str) -> None:
    """A policy change gets a new version, and the old value comes back."""
    url = f"{base}/admin/policy"
    before: dict[str, Any] = json.loads(call("GET", url, key))
    old = before["document"]["theta_f"]
    new = 0.5 if old != 0.5 else 0.4
    changed = json.loads(call("PATCH", url, key, {"theta_f": new}))
    call("PATCH", url, key, {"theta_f": old}, {"If-Match": f'"{changed["version"]}"'})
    if changed["version"] == before["version"] or changed["document"]["theta_f"] != new:
        raise SmokeError(f"the policy did not change: {changed}")
    print(f"policy: theta_f {old} -> {new} -> {old}")


def first_key(text: str) -> str:
    """The first key of a key file, whose lines are `name: key` or a bare key; "" without any."""
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    return re.sub(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:\s+", "", keys[0]) if keys else ""


def key_in_folder(folder: str) -> str:
    """The key in the first file of a mounted Secret; "" without a folder or a file."""
    files = sorted(Path(folder).iterdir()) if folder else []
    entries = [file for file in files if not file.name.startswith(".")]
    return first_key(entries[0].read_text()) if entries else ""


def main() -> int:
    """Run the checks; returns the exit code."""
    base = sys.argv[1].rstrip("/")
    admin_key = first_key(os.environ.get("SMOKE_ADMIN_KEYS", ""))
    admin_key = admin_key or key_in_folder(os.environ.get("SMOKE_ADMIN_KEYS_DIR", ""))
    admin_url = os.environ.get("SMOKE_ADMIN_URL", base)
    api_key = os.environ.get("SMOKE_API_KEY", "").strip()
    api_key = api_key or key_in_folder(os.environ.get("SMOKE_API_KEYS_DIR", ""))
    try:
        check_chat(base, api_key)
        check_metrics(base, api_key)
        if admin_key and os.environ.get("SMOKE_MODE") != "off":
            check_policy(admin_url, admin_key)
        else:
            print("policy: not checked (mode off, or no admin key)")
    except SmokeError as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
