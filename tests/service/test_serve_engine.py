"""The whole service: ``vtoken-serve serve`` with the embedded model, asked over HTTP.

One server serves all tests but the last, and before them those of ``test_clients_engine.py``: they
run in order, and the last ones kill it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from service.metrics import PREFIX, SERVICE_METRICS
from tests.service.embedded_server import API_KEY, MODEL, Server
from tests.service.server_process import are_gone, total, wait_for
from vtoken.stats import METRICS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(embedded_server) -> Server:
    return embedded_server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


def stream_of(client: openai.OpenAI, max_tokens: int):
    return client.completions.create(
        model=MODEL,
        prompt="Once upon a time, in a small village by the sea, there lived",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        logprobs=0,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )


def test_ready_line_and_models(server, client):
    """The announced address answers, with the announced model."""
    ready = [line for line in server.text().splitlines() if "vtoken-serve ready on" in line]
    assert len(ready) == 1
    assert MODEL in ready[0]
    assert "mode lazy, policy streaming_llm" in ready[0]
    assert f"curl {server.url}/v1/chat/completions" in server.text()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert server.get("/health").status_code == 200


def test_chat(client):
    """A chat answer with usage and logprobs."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == answer.usage.completion_tokens
    assert len(logprobs.content[0].top_logprobs) == 2


def test_streamed_chat_is_the_unstreamed_one(client):
    """Chunks put together give the same text (both with a warm prefix cache: bf16 has ties)."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    client.chat.completions.create(**request)
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert len(chunks) > 1  # vLLM merges deltas when it runs ahead of its reader
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


def test_completions_and_tokenize(server, client):
    """Both count the same tokens."""
    answer = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=5)
    assert answer.usage.completion_tokens <= 5
    body = {"model": MODEL, "prompt": "One, two, three,"}
    headers = {"Authorization": f"Bearer {API_KEY}"}
    tokens = httpx.post(server.url + "/tokenize", json=body, headers=headers, timeout=300).json()
    assert tokens["count"] == answer.usage.prompt_tokens


def test_tools_are_accepted(client):
    """A required tool gives a call with JSON arguments (guided decoding)."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How warm is it, in celsius?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=120,
        temperature=0,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert "celsius" in call.function.arguments


def test_bad_requests_have_the_openai_error_body(client):
    """The official client understands what is wrong."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=-1
        )
    assert caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="Hi")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="word " * 4000, max_tokens=1)


PROMPT = "Once upon a time, in a small village by the sea, there lived an old fisherman. " * 12
BUDGETS = {"h2o": 120, "random": 64}
MAX_TOKENS = 70
INTERVAL = 16


def xargs(**ours: object) -> dict[str, object]:
    """``extra_body`` with ``vtoken_*`` keys, for a full-length answer."""
    return {
        "ignore_eos": True,
        "vllm_xargs": {f"vtoken_{name}": value for name, value in ours.items()},
    }


def ask(client: openai.OpenAI, *, chat: bool, stream: bool, **ours: object):
    """One answer: ``(usage, receipt, number of events)``, through the official client.

    Each combination has its own prompt, so that no two running requests share a block.
    """
    prompt = f"{stream} {ours}. {PROMPT}"
    request = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": stream}
    request["extra_body"] = xargs(**ours)
    if stream:
        request["stream_options"] = {"include_usage": True}
    if chat:
        messages = [{"role": "user", "content": prompt}]
        answer = client.chat.completions.create(messages=messages, **request)
    else:
        answer = client.completions.create(prompt=prompt, **request)
    if not stream:
        return answer.usage, getattr(answer, "vtoken", None), 1
    chunks = list(answer)
    usage = next(chunk.usage for chunk in chunks if chunk.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    return usage, getattr(chunks[-1], "vtoken", None), len(chunks)


def expected_evictions(prompt_tokens: int, budget: int) -> int:
    """At the end of prefill and at every interval, until the last token is sampled."""
    last = prompt_tokens + (MAX_TOKENS - 2) // INTERVAL * INTERVAL
    return last - budget


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_concurrent_requests_get_their_own_policy_and_budget(server, client, chat, stream):
    """Exact numbers of evicted tokens in the receipts, equal to what the metrics counted."""
    before = server.fresh_metrics()
    jobs = [{"policy": policy, "budget_tokens": budget} for policy, budget in BUDGETS.items()]
    jobs += [{"evict": False}, {"policy": "streaming_llm", "protect": "0:100"}]
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(ask, client, chat=chat, stream=stream, receipt=True, **j) for j in jobs
        ]
        answers = [future.result() for future in futures]
    for job, (usage, receipt, num_events) in zip(jobs, answers, strict=True):
        assert usage.completion_tokens == MAX_TOKENS
        assert num_events > 5 or not stream  # on a slow machine some deltas are merged
        assert receipt["num_sequences"] == 1
        assert receipt["policy"] == job.get("policy", "none")
        evicted = 0
        if "budget_tokens" in job:
            evicted = expected_evictions(usage.prompt_tokens, job["budget_tokens"])
        elif "protect" in job:  # 100 protected and 32 recent tokens are more than the budget
            evicted = expected_evictions(usage.prompt_tokens, 100 + 32)
        assert receipt["evicted_tokens"] == evicted, job
        assert receipt["live_tokens"] == usage.prompt_tokens + MAX_TOKENS - 1 - evicted
    etag = server.admin("GET", "/admin/policy").headers["ETag"]
    assert {f'"{receipt["policy_version"]}"' for _, receipt, _ in answers} == {etag}

    def counted(name: str) -> float:
        return sum(server.metrics()[name].values()) - sum(before[name].values())

    for field in ("evicted_tokens", "freed_blocks"):
        expected = sum(receipt[field] for _, receipt, _ in answers)
        assert expected > 0
        if field == "freed_blocks" and chat:
            continue  # the template's first block is shared: letting go of it frees nothing
        wait_for(lambda n=f"vtoken_{field}_total", e=expected: counted(n) == e, 120)


def test_receipt_covers_all_sequences_and_stop_strings(client):
    """Two prompts with two answers each, and one that the API process ends at a stop string."""
    answer = client.completions.create(
        model=MODEL, prompt=[PROMPT, PROMPT], n=2, max_tokens=20, extra_body=xargs(receipt=True)
    )
    assert len(answer.choices) == answer.vtoken["num_sequences"] == 4
    prompt_tokens = answer.usage.prompt_tokens  # of two prompts
    assert answer.vtoken["evicted_tokens"] == 2 * prompt_tokens + 4 * INTERVAL - 4 * 96
    stopped = client.completions.create(
        model=MODEL, prompt=PROMPT, stop=["e"], max_tokens=50, extra_body=xargs(receipt=True)
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.vtoken["num_sequences"] == 1
    assert stopped.vtoken["evicted_tokens"] > 0


def test_clients_that_do_not_ask_see_nothing_of_it(client):
    """Neither in the answer nor among the events."""
    assert ask(client, chat=True, stream=False, keep_ratio=0.5)[1] is None
    assert ask(client, chat=True, stream=True, keep_ratio=0.5)[1] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("ours", "param"),
    [
        ({"policy": "h20"}, "vtoken_policy"),
        ({"keep_ratio": 1.5}, "vtoken_keep_ratio"),
        ({"budget_tokens": 8}, "vtoken_budget_tokens"),
        ({"polcy": "h2o"}, "vtoken_polcy"),
    ],
)
def test_wrong_options_are_bad_requests(client, chat, stream, ours, param):
    """Before a stream begins; the official client raises, with the field as ``param``."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat=chat, stream=stream, **ours)
    assert caught.value.param == param
    assert f"{param}=" in caught.value.message


def test_metrics_have_both_families(server):
    """vLLM's and ours, on one page that the official parser reads, with the same labels."""
    samples = server.metrics()
    for spec in [*METRICS.values(), *SERVICE_METRICS]:
        suffix = "_count" if spec.kind == "histogram" else ""
        assert PREFIX + spec.name + suffix in samples
    vllm_labels = dict(next(iter(samples["vllm:num_requests_running"])))
    our_labels = dict(next(iter(samples["vtoken_waste_ratio"])))
    assert our_labels == vllm_labels
    assert our_labels["model_name"] == MODEL
    assert server.total("vtoken_poll_failures_total") == 0


def test_admin_is_guarded(server):
    """401 apart from 422; nothing of it needs vLLM's own API key."""
    for path in ("/admin/policy", "/admin/policies", "/admin/state"):
        assert server.admin("GET", path, key=None).status_code == 401
        refused = server.admin("GET", path, key="wrong")
        assert refused.status_code == 401
        assert "WWW-Authenticate" in refused.headers
        assert server.admin("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"theta_f": 1.5}, "theta_f"),
        ({"theta_f": "x"}, "theta_f"),
        ({"policy": "no_such_policy"}, "policy"),
        ({"policy": 5}, "policy"),
        ({"policy_args": 5}, "policy_args"),
        ({"budget_tokens": 1}, "budget_tokens"),
        ({"mode": "off"}, "mode"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_bad_values_name_field_and_bound(server, changes, field):
    """422, and the policy keeps its version."""
    before = server.admin("GET", "/admin/policy")
    refused = server.admin("PATCH", "/admin/policy", json=changes)
    assert refused.status_code == 422, refused.text
    assert refused.json()["error"]["field"] == field
    assert refused.json()["error"]["bound"]
    assert server.admin("GET", "/admin/policy").headers["ETag"] == before.headers["ETag"]


def test_unreadable_bodies_are_refused(server):
    """400, and a stale version 412."""
    assert server.admin("PATCH", "/admin/policy", content=b"{").status_code == 400
    stale = {"If-Match": '"12345"'}
    assert server.admin("PATCH", "/admin/policy", json={}, headers=stale).status_code == 412


def test_catalogue_names_the_policies(server):
    """Each with the schema of its arguments."""
    policies = server.admin("GET", "/admin/policies").json()["policies"]
    assert {"none", "streaming_llm", "random"} <= {policy["name"] for policy in policies}
    assert all("args_schema" in policy for policy in policies)


def test_patch_changes_the_policy_of_a_running_stream(server, client):
    """No token is lost, the new policy evicts, and blocks are compacted."""
    before = server.fresh_metrics()
    etag = server.admin("GET", "/admin/policy").headers["ETag"]
    stream, num_tokens = stream_of(client, max_tokens=1900), 0

    def read_until_counted(name: str, **labels: str) -> None:
        """Chunks that have each token, until the metric has grown."""
        nonlocal num_tokens
        start = total(before, name, **labels)
        for chunk in stream:  # of several tokens when vLLM runs ahead of its reader
            num_tokens += len(chunk.choices[0].logprobs.tokens)
            assert chunk.usage.completion_tokens == num_tokens
            if server.total(name, **labels) > start:
                return
        raise AssertionError(f"the stream ended before {name} grew")

    read_until_counted("vtoken_evicted_tokens_total", policy="streaming_llm")
    changed = server.admin(
        "PATCH", "/admin/policy", json={"policy": "random"}, headers={"If-Match": etag}
    )
    assert changed.status_code == 200
    assert changed.json()["document"]["policy"] == "random"
    assert changed.headers["ETag"] != etag
    state = server.admin("GET", "/admin/state").json()
    assert [request["status"] for request in state["requests"]] == ["running"]
    read_until_counted("vtoken_evicted_tokens_total", policy="random")
    read_until_counted("vtoken_relocations_total", outcome="committed")
    stream.close()
    assert server.total("vtoken_request_evicted_tokens_count") >= 1
    assert server.total("vtoken_relocated_bytes_total") > 0
    assert server.total("vtoken_invariant_checks_total") > 0
    assert server.total("vtoken_invariant_violations_total") == 0
    after = server.metrics()
    for spec in METRICS.values():
        if spec.kind == "counter":
            name = PREFIX + spec.name
            assert all(after[name][labels] >= value for labels, value in before[name].items())
    info = dict(next(iter(after["vtoken_policy_info"])))
    assert info["policy"] == "random"
    assert f'"{info["version"]}"' == changed.headers["ETag"]


def test_all_blocks_are_free_afterwards(server):
    """No request is left, and the pool is whole."""

    def is_idle() -> bool:
        state = server.admin("GET", "/admin/state").json()
        pool, engine = state["pool"], state["engine"]
        has_none = not state["requests"] and engine["running"] == engine["waiting"] == 0
        return has_none and pool["free_blocks"] == pool["total_blocks"]

    wait_for(is_idle, 120)


def test_dropped_client_frees_its_blocks(server, client):
    """A stream that is closed half-way is aborted in the engine."""
    stream = stream_of(client, max_tokens=1500)
    next(stream)
    assert server.admin("GET", "/admin/state").json()["engine"]["running"] == 1
    stream.close()

    def is_free() -> bool:
        pool = server.admin("GET", "/admin/state").json()["pool"]
        return pool["free_blocks"] == pool["total_blocks"]

    wait_for(is_free, 120)


def test_killed_engine_ends_the_service(server, client):
    """/health is not 200, the stream ends, the exit code is 1, and no process is left."""
    processes = server.descendants()
    stream = stream_of(client, max_tokens=1500)
    next(stream)
    ended = threading.Event()

    def drain() -> None:
        try:
            for _ in stream:
                pass
        except (openai.OpenAIError, httpx.HTTPError):
            pass
        ended.set()

    threading.Thread(target=drain, daemon=True).start()
    server.named("EngineCore")[0].send_signal(signal.SIGKILL)

    def is_unhealthy() -> bool:
        try:
            return server.get("/health").status_code != 200
        except httpx.TransportError:
            return True

    wait_for(is_unhealthy, 120)
    assert ended.wait(300)
    assert server.process.wait(timeout=300) == 1
    assert "the engine died" in server.text()
    wait_for(lambda: are_gone(processes), 120)


def test_sigterm_while_the_engine_starts_leaves_no_process(tmp_path):
    """Exit code 143. A server that serves is stopped elsewhere."""
    server = Server(tmp_path / "log.txt")
    try:
        wait_for(lambda: "Initializing a V1 LLM engine" in server.text())
        processes = server.descendants()
        assert processes
        server.process.terminate()
        assert server.process.wait(timeout=300) == 143
        wait_for(lambda: are_gone(processes), 120)
    finally:
        server.kill_all()
