"""The middleware: what is refused with which body, what passes untouched, how receipts come."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from service import request_control
from service.endpoint_plugin import make_plugin
from service.forms import FORM_ROUTES
from service.receipts import ReceiptSender, with_member
from service.request_control import PLACES, WITH_RECEIPT
from service.routes import ROUTES, Access
from vtoken.config import VTokenConfig

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
WITH_XARGS = sorted(path for path, place in PLACES.items() if place == ("vllm_xargs",))
NO_MODEL_OF_OURS = {
    "/v1/realtime",  # a web socket, of models for sound
    # no model at all
    "/cohere/v2/chat/render",
    "/detokenize",
    "/docs",
    "/docs/oauth2-redirect",
    "/inference/v1/abort_requests",
    "/kv_event_sources",
    "/openapi.json",
    "/redoc",
    "/static/{path:path}",
    "/tokenize",
    "/tokenizer_info",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/models",
    "/v1/models/{model_id:path}",
    "/v1/responses/render",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
}
"""Routes behind an API key whose bodies may say about eviction what they like."""
SOUND = ("a.wav", b"RIFF\0vtoken_policy\0\xff", "audio/wav")
"""Of no form: it merely has our name in it."""
RECEIPT = {"policy": "h2o", "policy_version": 1, "evicted_tokens": 12}
EVENTS = [
    'data: {"id":"chatcmpl-1","object":"chunk","created":5,"model":"m","choices":[{"index":0}]}',
    ": keep-alive",
    'data: {"id":"chatcmpl-1","object":"chunk","created":5,"model":"m","choices":[{"text":'
    '"\\n\\ndata: [DONE]"}]}',
    "data: [DONE]",
]


class Service:
    """vLLM's place behind our middleware: remembers what reaches it and answers."""

    def __init__(self, engine: Any, make: Any, mode: str = "lazy") -> None:
        self.seen: list[dict[str, Any]] = []
        self.raw = b""
        self.answer: Any = {"id": "cmpl-1", "choices": [], "usage": {"total_tokens": 3}}
        self.status = 200
        self.app = FastAPI()
        make_plugin().attach_router(self.app)
        link = make.link(engine, mode=mode)
        link.document = VTokenConfig().to_dict()
        self.link = link
        self.app.state.vtoken = SimpleNamespace(link=link)
        for path in (*request_control.CHECKED, "/tokenize"):
            self.app.post(path)(self._serve)

    async def _serve(self, request: Request) -> Any:
        self.raw = await request.body()
        is_form = "form" in request.headers["content-type"]
        self.seen.append({} if is_form else await request.json())
        assert int(request.headers["content-length"]) == len(self.raw)
        if b'"stream": true' in self.raw:
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse(self.answer, status_code=self.status)

    async def _events(self) -> Any:
        for event in EVENTS:
            yield event + "\n\n"

    def post(self, body: Any, path: str = CHAT) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(path, content=content, headers={"content-type": "application/json"})

    def send(self, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, **options)

        return asyncio.run(run())


@pytest.fixture
def service(engine, make) -> Service:
    return Service(engine, make)


def xargs(**ours: Any) -> dict[str, Any]:
    return {"vllm_xargs": {f"vtoken_{name}": value for name, value in ours.items()}}


def at(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """With the options where this route has them, or at the top if it has no place for them."""
    others = {name: value for name, value in given.items() if name != "vllm_xargs"}
    return {**others, **inside(PLACES[path], given.get("vllm_xargs", {}))}


def inside(place: tuple[str, ...], members: dict[str, Any]) -> dict[str, Any]:
    """A body with these members there."""
    for name in reversed(place):
        members = {name: members}
    return members


def test_every_way_to_the_model_is_checked():
    """A route that nobody has thought of fails here (and the table of routes is complete)."""
    assert {*ROUTES[Access.API]} - NO_MODEL_OF_OURS == request_control.CHECKED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*WITH_XARGS, GENERATE])
@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (xargs(keep_ratio=1.5), "vtoken_keep_ratio", "1.5 is not allowed: a number with 0 <"),
        (xargs(budget_tokens=36), "vtoken_budget_tokens", "> sink_tokens + recent_tokens = 36"),
        (xargs(policy="h20"), "vtoken_policy", "did you mean 'h2o'"),
        (xargs(policy=["h2o"]), "vtoken_policy", "the name of a policy"),
        (
            xargs(policy="scissorhands", policy_args='{"history_window": 0}'),
            "vtoken_policy_args.history_window",
            "in 1 … 64",
        ),
        (xargs(policy="h2o", policy_args='{"x": 1}'), "vtoken_policy_args.x", "of policy 'h2o'"),
        (xargs(policy="h2o", policy_args={"x": 1}), "vtoken_policy_args", "written as a string"),
        (xargs(protect=[[0, 35]]), "vtoken_protect", '"0:35,100:120"'),
        (xargs(evict="no"), "vtoken_evict", "true or false"),
        (xargs(evict=False, policy="h2o"), "vtoken_policy", "vtoken_evict=false"),
        (xargs(receipt="mine"), "vtoken_receipt", "true or false"),
        (xargs(polcy="h2o"), "vtoken_polcy", "did you mean 'vtoken_policy'"),
        ({"vtoken_policy": "h2o"}, "vtoken_policy", "only inside "),
        ({"vtoken_polcy": "h2o"}, "vtoken_polcy", "did you mean 'vtoken_policy'"),
        (
            {"use_beam_search": True, **xargs(keep_ratio=0.5)},
            "vtoken_keep_ratio",
            "use_beam_search",
        ),
    ],
)
def test_wrong_values_are_400_and_go_no_further(service, given, param, words, path, stream):
    """OpenAI's error body with the field as ``param``, before vLLM sees the request."""
    answer = service.post({"model": "m", "stream": stream, **at(path, given)}, path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, 400, "BadRequestError")
    assert words in error["message"]
    assert error["message"].startswith(f"{param}=")
    assert service.seen == []


@pytest.mark.parametrize("path", [*WITH_XARGS, GENERATE])
def test_mode_off_refuses_with_the_reason(engine, make, path):
    """Nothing would come of the keys; requests without any pass."""
    service = Service(engine, make, mode="off")
    answer = service.post({"stream": True, **at(path, xargs(policy="h2o"))}, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vtoken_policy"
    assert "mode off" in answer.json()["error"]["message"]
    assert service.post(at(path, {"vllm_xargs": {"theirs": 1}}), path).status_code == 200


@pytest.mark.parametrize("path", sorted(request_control.CHECKED - FORM_ROUTES))
@pytest.mark.parametrize("place", [(), ("vllm_xargs",), ("sampling_params", "extra_args")])
def test_options_elsewhere_are_refused_with_the_place(service, path, place):
    """vLLM drops members that it does not know; it is said where they belong, if anywhere."""
    right = PLACES[path]
    answer = service.post({"model": "m", **inside(place, {"vtoken_policy": "h2o"})}, path)
    if place and place == right:
        assert answer.status_code == 200
        return
    expected = f"only inside {'.'.join(right)}" if right else f"not on {path}"
    assert answer.json()["error"]["message"].endswith(f"is not allowed: {expected}")
    assert service.seen == []


@pytest.mark.parametrize("mode", ["lazy", "off"])
@pytest.mark.parametrize("path", sorted(FORM_ROUTES))
@pytest.mark.parametrize(
    "fields",
    [
        {"vtoken_policy": "h2o"},
        {"vllm_xargs": '{"vtoken_policy": "h2o"}'},
        {"vllm_xargs": '{"\\u0076token_policy": "h2o"}'},
        {"vllm_xargs": ['{"vtoken_policy": "h2o"}', "{}"]},
        {"vtoken_policy": ["h2o", "h2o"], "model": "m"},
    ],
)
def test_forms_are_checked_as_json_is(engine, make, path, fields, mode):
    """vLLM drops fields that it does not know, and the models of these routes have no evictions."""
    service = Service(engine, make, mode)
    answer = service.send(path, data=fields, files={"file": SOUND})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vtoken_policy"
    assert f"not on {path}" in answer.json()["error"]["message"]
    assert service.seen == []


@pytest.mark.parametrize("path", sorted(FORM_ROUTES))
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "vtoken_policy", "vllm_xargs": '{"theirs": "vtoken_"}'},
        {"vllm_xargs": '{"vtoken_policy'},
        {"vllm_xargs": "[1]"},
        {},
    ],
)
def test_other_forms_pass_byte_for_byte(service, path, fields):
    """Sound may have any bytes, and a field that vLLM cannot read is for it to refuse."""
    assert service.send(path, data=fields, files={"file": SOUND}).json() == service.answer
    assert SOUND[1] in service.raw


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"vtoken_policy"),
        ("multipart/form-data; boundary=x", b"vtoken_policy"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nvtoken_policy\r\n--x--"),
    ],
)
def test_forms_that_cannot_be_read_are_left_to_vllm(service, kind, body):
    """It has its own words for them."""
    path = min(FORM_ROUTES)
    answer = service.send(path, content=body, headers={"content-type": kind})
    assert (answer.status_code, service.raw) == (200, body)


def test_form_of_a_client_that_went_away_is_passed_on(service):
    """The application hears of it."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    async def run() -> None:
        part = {"type": "http.request", "body": b"--x\r\nvtoken_", "more_body": True}
        waiting = iter([part, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            return next(waiting)

        headers = [(b"content-type", b"multipart/form-data; boundary=x")]
        scope = {"type": "http", "method": "POST", "path": min(FORM_ROUTES), "headers": headers}
        await request_control.RequestControl(app)({**scope, "app": service.app}, receive, None)

    asyncio.run(run())
    assert heard == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("path", sorted(request_control.CHECKED))
@pytest.mark.parametrize("query", ["vtoken_policy=h2o", "a=1&vtoken%5Fpolicy"])
def test_options_in_the_query_are_refused(service, path, query):
    """vLLM drops those, too."""
    answer = service.send(f"{path}?{query}", content=b"{}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vtoken_policy"
    assert service.seen == []
    headers = {"content-type": "application/json"}
    assert service.send(path + "?theirs=1", content=b"{}", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"vllm_xargs": {"vtoken_policy": "h2o", "vtoken_policy": "none"}}', "vtoken_policy"),
        (b'{"vllm_xargs": {"vtoken_policy": "h2o"}, "vllm_xargs": {}}', "vllm_xargs"),
    ],
)
def test_options_given_twice_are_refused(service, body, param):
    """The last would count, and the other be lost without a word."""
    answer = service.post(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "given once" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["vtoken_\ud800", "vtoken_\0", "vtoken_\n", "vtoken_é", "vtoken_" + "x" * 10**6]
)
def test_strange_names_are_refused_in_a_short_answer(service, name):
    """Half of a surrogate pair, too, which no answer can carry as it is."""
    for given in ({"vllm_xargs": {name: 1}}, {name: name}):
        answer = service.post(given)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("vtoken_")
        assert len(answer.content) < 4000


@pytest.mark.parametrize("value", ["1e400", "-1e400", "NaN", "Infinity", "true", '"0.5"', "1e-400"])
def test_numbers_that_are_none_are_refused(service, value):
    """Whatever Python makes of them."""
    for name in ("keep_ratio", "budget_tokens"):
        answer = service.post(
            b'{"vllm_xargs": {"vtoken_%s": %s}}' % (name.encode(), value.encode())
        )
        assert answer.json()["error"]["param"] == f"vtoken_{name}"


def test_generate_takes_options_of_its_sampling_parameters(service):
    """Valid ones pass byte for byte."""
    body = b'{"token_ids": [1], "sampling_params": {"extra_args":  {"vtoken_evict": false}}}'
    assert service.post(body, GENERATE).json() == service.answer
    assert service.raw == body


@pytest.mark.parametrize("path", [*WITH_XARGS, "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m",  "prompt":"vtoken_policy is a key"}',
        b'{"vllm_xargs": {"vtoken_policy": "h2o", "theirs": 1, "vtoken_keep_ratio": 0.50}}',
        b'{"vllm_xargs": {"vtoken_evict": false}, "n": 1e2, "n": 3}',
        b'{"vllm_xargs": null, "prompt": "vtoken_"}',
        b'{"vllm_xargs": ["vtoken_policy"]}',
        b'["vtoken_policy"]',
        b'{"prompt": "caf\\u00e9"}',
    ],
)
def test_everything_else_passes_byte_for_byte(service, body, path):
    """Valid options, no options, and bodies for vLLM to judge."""
    assert service.post(body, path).json() == service.answer
    assert service.raw == body


def test_unreadable_bodies_are_left_to_vllm(service):
    """It has its own words for them."""
    with pytest.raises(json.JSONDecodeError):
        service.post(b'{"vtoken_policy"')
    assert service.raw == b'{"vtoken_policy"'


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"\\u0076token_policy": "nix"}}',
        json.dumps(xargs(policy="nix")).encode("utf-16"),
        json.dumps(xargs(policy="nix")).encode("utf-32-le"),
    ],
)
def test_hidden_keys_are_found(service, body):
    """JSON may escape letters and come in other encodings."""
    assert service.post(body).json()["error"]["param"] == "vtoken_policy"


def test_long_bodies_may_not_name_us(service, monkeypatch):
    """They are not parsed; without our keys they pass."""
    monkeypatch.setattr(request_control, "MAX_BODY_BYTES", 100)
    filler = {"prompt": "x" * 100}
    assert service.post(filler).status_code == 200
    answer = service.post({**filler, **xargs(keep_ratio=0.5)})
    assert answer.status_code == 400
    assert "at most 100 bytes" in answer.json()["error"]["message"]


def test_long_values_are_not_repeated(service):
    """The message stays readable and still says what is allowed."""
    message = service.post(xargs(policy="x" * 5000)).json()["error"]["message"]
    assert len(message) < 2000
    assert "known policies are" in message


def test_the_present_document_counts(service, engine, make):
    """After a change through this service, budgets are held against the new sinks."""
    asyncio.run(service.link.set_policy({"sink_tokens": 100}))
    assert "= 132" in service.post(xargs(budget_tokens=132)).json()["error"]["message"]
    assert service.post(xargs(budget_tokens=133)).status_code == 200


# -- receipts ------------------------------------------------------------------------------


@pytest.fixture
def with_receipts(service, engine) -> Service:
    engine.reply = {"ok": RECEIPT}
    return service


@pytest.mark.parametrize("path", sorted(WITH_RECEIPT))
def test_receipt_joins_the_json_answer(with_receipts, engine, path):
    """With the key that the engine got; the rest of the request and of the answer stays."""
    body = {"n": 2, **xargs(receipt=True, policy="h2o")}
    answer = with_receipts.post(body, path)
    assert answer.json() == {**with_receipts.answer, "vtoken": RECEIPT}
    (seen,) = with_receipts.seen
    key = seen["vllm_xargs"].pop("vtoken_receipt")
    assert len(key) == 32
    assert engine.calls == [("receipt", {"key": key})]
    assert seen == {"n": 2, **xargs(policy="h2o")}
    with_receipts.post(body, path)
    assert with_receipts.seen[1]["vllm_xargs"]["vtoken_receipt"] != key


@pytest.mark.parametrize("path", sorted(WITH_RECEIPT))
def test_receipt_is_the_last_event_of_a_stream(with_receipts, path):
    """Before [DONE], with what every event repeats; text that looks like the end is not it."""
    lines = with_receipts.post({"stream": True, **xargs(receipt=True)}, path).text.split("\n\n")
    assert lines[:3] == EVENTS[:3]
    assert lines[4:] == ["data: [DONE]", ""]
    assert json.loads(lines[3].removeprefix("data: ")) == {
        "id": "chatcmpl-1",
        "object": "chunk",
        "created": 5,
        "model": "m",
        "choices": [],
        "vtoken": RECEIPT,
    }


def test_nobody_who_did_not_ask_gets_one(with_receipts, engine):
    """Neither with other options nor with a receipt refused."""
    for value in ({}, xargs(receipt=False), xargs(keep_ratio=0.5)):
        assert with_receipts.post(value).json() == with_receipts.answer
    text = with_receipts.post({"stream": True, **xargs(keep_ratio=0.5)}).text
    assert text.split("\n\n")[:-1] == EVENTS
    assert engine.calls == []


@pytest.mark.parametrize("path", sorted(request_control.CHECKED - WITH_RECEIPT - FORM_ROUTES))
def test_receipt_elsewhere_is_refused(service, path):
    """Rather than asked for and never seen."""
    answer = service.post(at(path, xargs(receipt=True)), path)
    assert answer.json()["error"]["param"] == "vtoken_receipt"


def test_errors_of_vllm_carry_no_receipt(with_receipts, engine):
    """They pass as they are."""
    with_receipts.status = 404
    assert with_receipts.post(xargs(receipt=True)).json() == with_receipts.answer
    assert engine.calls == []


def test_answer_does_not_fail_for_want_of_a_receipt(service, engine):
    """The engine died with the last token: null."""
    engine.error = RuntimeError("gone")
    assert service.post(xargs(receipt=True)).json() == {**service.answer, "vtoken": None}
    assert '"vtoken":null' in service.post({"stream": True, **xargs(receipt=True)}).text


def test_stream_is_never_held_back():
    """Each chunk leaves before the next arrives."""

    async def run() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def fetch() -> dict[str, Any]:
            return RECEIPT

        sender = ReceiptSender(send, fetch)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await sender(start)
        assert sent == [start]
        for i, text in enumerate([*EVENTS[:3], EVENTS[0] + "\n\n" + EVENTS[3]], 2):
            body = (text + "\n\n").encode()
            await sender({"type": "http.response.body", "body": body, "more_body": True})
            assert len(sent) == i
        assert sent[-1]["body"].index(b'"vtoken"') < sent[-1]["body"].index(b"\n\ndata: [DONE]")

    asyncio.run(run())


def test_disconnect_reaches_the_application(service):
    """Before and after the body is complete."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not heard or heard[-1] != "http.disconnect":
            heard.append((await receive())["type"])

    async def run(messages: list[dict[str, Any]]) -> list[str]:
        heard.clear()
        waiting = iter([*messages, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            return next(waiting)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": service.app}
        await request_control.RequestControl(app)(scope, receive, None)
        return list(heard)

    part = {"type": "http.request", "body": b'{"a": "vtoken_', "more_body": True}
    rest = {"type": "http.request", "body": b'"}', "more_body": False}
    kinds = ["http.request", "http.request", "http.disconnect"]
    assert asyncio.run(run([part, rest])) == kinds
    assert asyncio.run(run([part])) == kinds[1:]


def test_root_path_is_not_part_of_the_route(service):
    """Behind a proxy with a prefix, as vLLM's own key check sees it."""
    service.app.root_path = "/llm"
    assert service.post(xargs(policy="nix"), "/llm" + CHAT).status_code == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"null"])
def test_with_member_leaves_other_bodies(body):
    """Only an object can take a member."""
    assert with_member(body, RECEIPT) == body
