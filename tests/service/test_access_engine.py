"""Keys, ports, pinned documents and made-up requests, on a real server with the tiny model.

One server serves all tests. The model's routes are fuzzed from the server's own OpenAPI document:
a valid request with some members replaced by what the document allows, or does not allow.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings

from tests.service.server_process import wait_for
from tests.service.tiny_server import LASTING_TOKENS, MODEL, TinyServer, body, events, words

pytestmark = pytest.mark.engine

CHAT = [{"role": "user", "content": "w5 w6"}]
VALID: dict[str, tuple[int, dict[str, Any]]] = {
    "/tokenize": (15, {"prompt": "w5 w6"}),
    "/detokenize": (15, {"tokens": [5, 6]}),
    "/v1/completions": (25, {"prompt": "w5 w6", "max_tokens": 3}),
    "/v1/chat/completions": (20, {"messages": CHAT, "max_tokens": 3}),
    "/v1/chat/completions/batch": (4, {"messages": [CHAT], "max_tokens": 3}),
    "/v1/responses": (10, {"input": "w5 w6", "max_output_tokens": 3}),
    "/v1/messages": (10, {"messages": CHAT, "max_tokens": 3}),
    "/v1/messages/count_tokens": (5, {"messages": CHAT}),
    "/generative_scoring": (10, {"query": "w5", "items": ["w6"], "label_token_ids": [5, 6]}),
}
"""Path to number of examples and what is sent but for the model's name."""

BOUNDED = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n")
"""Numbers that only decide how long an answer takes."""

GRAMMARS = {
    "structured_outputs",
    "response_format",
    "tools",
    "tool_choice",
    "text",
    "output_config",
}
"""Left out: xgrammar does not know the tiny model's tokenizer and fails in the middle of an answer
("grammar rejected tokens"), which vLLM answers with 500. With the embedded model it works."""

KNOWN: dict[str, int] = {"/v1/systemone": 501}
"""vLLM's own answer where the model cannot decide in structure; no other 5xx is accepted."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of API keys."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "alice").write_text("key-of-alice\n")
    return folder


@pytest.fixture(scope="module")
def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """Keys of every kind, and the admin routes on a port of their own."""
    folder = tmp_path_factory.mktemp("access")
    admins = folder / "admins"
    admins.write_text("# on call\nbob: key-of-bob\n")
    server = TinyServer(
        folder,
        *("--api-key", "key-of-vllm"),
        "--enable-scale-out",
        VTOKEN_API_KEYS_DIR=str(keys),
        VTOKEN_ADMIN_KEY_FILE=str(admins),
        VTOKEN_ADMIN_PORT="0",
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill_all()


@pytest.fixture(scope="module")
def admin(server: TinyServer) -> Iterator[httpx.Client]:
    """Bob, at the admin port."""
    found = wait_for(lambda: re.search(r"admin routes are on \S+ port (\d+),", server.text()), 120)
    headers = {"Authorization": "Bearer key-of-bob"}
    with httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", headers=headers, timeout=300) as bob:
        yield bob


@pytest.fixture(scope="module")
def api(server: TinyServer) -> Iterator[httpx.Client]:
    """Alice, at the main port."""
    headers = {"Authorization": "Bearer key-of-alice"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as alice:
        yield alice


def test_each_port_has_its_routes(server, api, admin):
    """The model here, admin there, probes on both."""
    assert api.get("/v1/models").status_code == 200
    assert api.get("/admin/policy").status_code == 404
    assert admin.get("/admin/policy").status_code == 200
    assert admin.get("/vtoken/ui").status_code == 200
    assert admin.get("/v1/models").status_code == 404
    assert admin.get("/health/ready").status_code == server.get("/health/ready").status_code == 200


def test_keys_open_what_vllm_leaves_open(server, api):
    """``/tokenize`` is guarded, too; vLLM's own key is one of the keys."""
    request = {"model": MODEL, "prompt": "w5"}
    assert server.post("/tokenize", json=request).status_code == 401
    assert api.post("/tokenize", json=request).status_code == 200
    headers = {"Authorization": "Bearer key-of-vllm"}
    assert server.post("/tokenize", json=request, headers=headers).status_code == 200


def test_keys_are_rotated_while_requests_run(server, api, keys):
    """A new file is a new key, a replaced one takes the old key away; a running answer goes on."""
    replace(keys / "carol", "first-of-carol")
    wait_for(lambda: models_as(server, "first-of-carol") == 200, 120)
    headers = {"Authorization": "Bearer first-of-carol"}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=120) as carol,
        Stream(carol, words(20)) as running,
    ):
        wait_for(lambda: running.num_events, 120)
        replace(keys / "carol", "second-of-carol")
        wait_for(lambda: models_as(server, "first-of-carol") == 401, 120)
        num_events = running.num_events
        wait_for(lambda: running.num_events > num_events, 120)
    assert models_as(server, "second-of-carol") == 200
    assert api.get("/v1/models").status_code == 200


def replace(path: Path, text: str) -> None:
    """Whole or not at all, whoever reads it meanwhile."""
    new = path.parent / ".new"
    new.write_text(text)
    new.replace(path)


def models_as(server: TinyServer, key: str) -> int:
    return server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def test_running_request_keeps_its_document_and_the_next_does_not(api, admin):
    """``apply_to=new`` on a live engine; dry run, history and rollback by name."""
    before = admin.get("/admin/policy").json()["version"]
    with Stream(api, words(150)) as running:
        requests = wait_for(lambda: admin.get("/admin/state").json()["requests"], 120)
        (first,) = [request["request_id"] for request in requests]
        change = {"budget_tokens": 64}
        tried = admin.patch("/admin/policy", params={"dry_run": "true"}, json=change).json()
        assert [request["request_id"] for request in tried["requests"]] == [first]
        assert tried["requests"][0]["evicted_tokens"] > 0
        params = {"apply_to": "new", "note": "quiet hours"}
        assert admin.patch("/admin/policy", params=params, json=change).status_code == 200
        with Stream(api, words(150, 300)) as other:
            states = wait_for(lambda: two_of(admin.get("/admin/state").json()["requests"]), 120)
            versions = {state["request_id"]: state["policy_version"] for state in states}
            assert versions.pop(first) == before
            assert list(versions.values()) == [before + 1]
            other.stop()
        running.stop()
    newest = admin.get("/admin/policy/history").json()["history"][0]
    assert (newest["by"], newest["note"], newest["apply_to"]) == ("bob", "quiet hours", "new")
    answer = admin.post("/admin/policy/rollback", headers={"If-Match": f'"{before + 1}"'})
    assert answer.json()["document"]["budget_tokens"] == 96


def two_of(requests: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return requests if len(requests) == 2 else None


class Stream:
    """A lasting answer that is read in the background until it is stopped."""

    def __init__(self, client: httpx.Client, prompt: str) -> None:
        self.num_events = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, prompt))

    def _read(self, client: httpx.Client, prompt: str) -> None:
        request = body(prompt, LASTING_TOKENS, stream=True)
        with client.stream("POST", "/v1/completions", json=request) as answer:
            for _ in events(answer):
                self.num_events += 1
                if self._stopped.is_set():
                    return

    def stop(self) -> None:
        """Hang up at the next event."""
        self._stopped.set()

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def schema(api: httpx.Client) -> Any:
    """Made from what the server says of itself."""
    return schemathesis.openapi.from_dict(api.get("/openapi.json").json())


def mixed(path: str, made_up: dict[str, Any], documented: set[str]) -> dict[str, Any]:
    """The valid request with one to five members of a made-up one."""
    rng = random.Random(repr(made_up))
    usable = sorted((made_up.keys() & documented or made_up.keys()) - GRAMMARS, key=str)
    chosen = rng.sample(usable, min(len(usable), rng.choice((1, 1, 2, 3, 5))))
    request = {"model": MODEL, **VALID[path][1], **{name: made_up[name] for name in chosen}}
    for name in BOUNDED:
        if isinstance(request.get(name), int) and request[name] > 4:
            request[name] = 4
    if isinstance(request["model"], str):
        request["model"] = MODEL
    return request | {
        name: VALID[path][1][name]  # null means as much as fits, which takes long
        for name in BOUNDED
        if name in request and request[name] is None and name in VALID[path][1]
    }


def documented_members(schema: Any, path: str) -> set[str]:
    """Members of the body that the document names."""
    content = schema.raw_schema["paths"][path]["post"]["requestBody"]["content"]
    found: set[str] = set()
    for media in content.values():
        for part in [media["schema"], *media["schema"].get("anyOf", ())]:
            name = part.get("$ref", "").rpartition("/")[2]
            found |= set(
                schema.raw_schema["components"]["schemas"].get(name, {}).get("properties", ())
            )
    return found


@pytest.mark.parametrize("path", VALID)
def test_made_up_requests_are_answered_without_server_error(api, schema, path):
    """What cannot be served is the client's fault, in words; and the server serves on."""
    num_examples, valid = VALID[path]
    documented = documented_members(schema, path)
    statuses: set[int] = set()

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path]["POST"].as_strategy())
    def send(case: schemathesis.Case) -> None:
        if not isinstance(case.body, dict):
            return
        answer = api.post(path, json=mixed(path, case.body, documented))
        statuses.add(answer.status_code)
        known = answer.status_code == KNOWN.get(path)
        assert answer.status_code < 500 or known, answer.text

    send()
    answer = api.post(path, json={"model": MODEL, **valid})
    assert answer.status_code == 200, answer.text
    assert statuses & {200, 400}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": "tiny"', b'{"a":' * 2000, b"{}"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_bodies_that_are_no_request_are_client_errors(api, path, content):
    """Whatever bytes come."""
    headers = {"Content-Type": "application/json"}
    assert 400 <= api.post(path, content=content, headers=headers).status_code < 500


def test_part_that_is_no_object_is_a_client_error(api):
    """vLLM's renderer asserts; see ``service/vllm_faults.py``."""
    request = {"model": MODEL, "input": [{"role": "user", "content": [5]}], "max_output_tokens": 3}
    assert api.post("/v1/responses", json=request).status_code == 400


def test_options_hold_on_vllms_other_ways_to_the_model(api):
    """SageMaker's route takes them and gives receipts as the one that it stands for; the one of
    tokens takes them where it has the engine's parameters."""
    xargs = {"vtoken_budget_tokens": 64, "vtoken_receipt": True}
    request = body(words(150), 20, vllm_xargs=xargs)
    num_evicted = api.post("/invocations", json=request).json()["vtoken"]["evicted_tokens"]
    assert num_evicted > 0
    with api.stream("POST", "/invocations", json={**request, "stream": True}) as stream:
        assert list(events(stream))[-1]["vtoken"]["evicted_tokens"] == num_evicted
    for value, status in ({"vtoken_evict": False}, 200), ({"vtoken_budget_tokens": 36}, 400):
        assert api.post("/invocations", json={**request, "vllm_xargs": value}).status_code == status
        tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "extra_args": value}}
        assert api.post("/inference/v1/generate", json=tokens).status_code == status


UNSENDABLE = [
    {"vllm_xargs": {"\ud800": 1}},
    {"session_id": "\ud800"},
    {"top_k": 10**30},
    {"stop": ["\ud800"]},
    {"input": ""},
    {"input": [{"type": "message", "role": "assistant", "content": [], "status": "completed"}]},
]
"""What cannot be encoded for the engine, an empty prompt, and a message without parts."""


@pytest.mark.parametrize("members", UNSENDABLE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_what_vllm_refuses_late_is_a_client_error_in_words(api, path, stream, members):
    """vLLM answers 500 without a message, or breaks the stream off; see ``service/generation.py``
    and ``service/vllm_faults.py``."""
    request = {"model": MODEL, **VALID[path][1], **members, "stream": stream}
    content = json.dumps(request)
    answer = api.post(path, content=content, headers={"Content-Type": "application/json"})
    text = answer.text
    assert answer.status_code < 500
    if answer.status_code == 400:
        error = answer.json()["error"]
    elif '"error"' in text and stream:
        lines = [line for line in text.splitlines() if line.startswith('data: {"error"')]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
    else:
        return  # a member that this route does not know
    assert error["code"] == 400
    assert error["message"]


def test_missing_capability_is_said(api):
    """The one known 5xx: vLLM's own, for what this model cannot do."""
    for path, status in KNOWN.items():
        answer = api.post(path, json={"questions": {}, "state": None})
        assert answer.status_code == status
        assert "does not support" in answer.text
