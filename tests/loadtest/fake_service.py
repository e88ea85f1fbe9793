"""A service without an engine: the routes a load test uses, with answers made up by rule.

Tokens are bytes; token ``n`` of an answer is ``n``. Counters grow by what was asked for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "fake-key"
LIVE_DEFAULTS: dict[str, Any] = {
    "mode": "lazy",
    "policy": "streaming_llm",
    "policy_args": {},
    "keep_ratio": None,
    "budget_tokens": 1024,
    "theta_f": 0.25,
}


class FakeService(ThreadingHTTPServer):
    """Keeps what it was asked.

    Attributes:
        requests: bodies of completions, in order.
        document: the policy document.
        broken: status with which completions are refused; 0: they are not.
        tokens_per_event: how many tokens one event carries, as when vLLM merges them.
        text: of every event.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.document = dict(LIVE_DEFAULTS)
        self.patches: list[dict[str, Any]] = []
        self.broken = 0
        self.tokens_per_event = 1
        self.text = "x"
        self.error_event = False
        self.has_chat_template = True
        self.steps = 0
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeService
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: no waiting for acknowledgements
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        if self.path.startswith("/admin") and not self._is_admin():
            return self._json({"error": "no key"}, 401)
        self.server.authorizations.append(self.headers.get("Authorization"))
        pages = {
            "/v1/models": {"data": [{"id": "fake"}]},
            "/admin/policy": {"version": 1, "document": self.server.document},
            "/admin/policies": {"policies": [{"name": "random", "args_schema": {}}]},
            "/admin/state": self._state(),
        }
        if self.path == "/metrics":
            return self._send(self._metrics().encode(), "text/plain")
        return self._json(pages[self.path])

    def do_PATCH(self) -> None:
        changes = self._body()
        if "no_such_field" in changes:
            return self._json({"error": {"message": "unknown field"}}, 422)
        self.server.patches.append(changes)
        self.server.document |= changes
        for name, other in (("keep_ratio", "budget_tokens"), ("budget_tokens", "keep_ratio")):
            if changes.get(name) is not None:
                self.server.document[other] = None
        return self._json({"version": 2, "document": self.server.document})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/tokenize":
            return self._tokenize(body)
        self.server.requests.append(body)
        if self.server.broken:
            return self._json({"error": {"message": "out of order"}}, self.server.broken)
        return self._stream(body) if body.get("stream") else self._whole(body)

    def _tokenize(self, body: dict[str, Any]) -> None:
        if "messages" in body:
            if not self.server.has_chat_template:
                return self._json({"error": {"message": "no chat template"}}, 400)
            text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        else:
            text = body["prompt"]
        return self._json({"tokens": list(text.encode())})

    def _whole(self, body: dict[str, Any]) -> None:
        ids = list(range(body["max_tokens"]))
        top = [{f"token_id:{t}": -0.1, "token_id:999": -2.5} for t in ids]
        choice = {
            "text": "".join(chr(97 + t % 26) for t in ids),
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-0.1] * len(ids), "top_logprobs": top},
        }
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": -0.5}, "7": {"logprob": -1.5}} for t in body["prompt"][1:]),
            ]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        answer = {"choices": [choice], "usage": usage}
        if body.get("vllm_xargs", {}).get("vtoken_receipt"):
            answer["vtoken"] = _receipt(usage, self.server.document)
        self._json(answer)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        total, at_once = body["max_tokens"], self.server.tokens_per_event
        for start in range(0, total, at_once):
            ids = list(range(start, min(start + at_once, total)))
            self.server.steps += len(ids)
            reason = "length" if ids[-1] == total - 1 else None
            self._event(
                {"choices": [{"text": self.server.text, "token_ids": ids, "finish_reason": reason}]}
            )
        if self.server.error_event:
            self._event({"error": {"message": "the engine died"}})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": total}
        self._event({"choices": [], "usage": usage})
        if body.get("vllm_xargs", {}).get("vtoken_receipt"):
            self._event({"choices": [], "vtoken": _receipt(usage, self.server.document)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _state(self) -> dict[str, Any]:
        naive = self.server.document["mode"] == "naive"
        request = {"status": "running", "num_computed_tokens": 9, "num_tokens": 10}
        return {
            "pool": {
                "retained_blocks": 40 if naive else 20,
                "ideal_blocks": 20,
                "waste_ratio": 0.5 if naive else 0.1,
                "low_utilization_block_ratio": 0.6 if naive else 0.0,
                "free_blocks": 50,
                "total_blocks": 100,
            },
            "requests": [request],
            "engine": {"running": 1, "waiting": 0, "steps": self.server.steps},
        }

    def _metrics(self) -> str:
        labels = 'model_name="fake",engine="0"'
        lines = [
            f"vllm:num_requests_running{{{labels}}} 0",
            f"vllm:num_requests_waiting{{{labels}}} 0",
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
            f'vllm:cache_config_info{{{labels},num_gpu_blocks="100"}} 1',
            "# TYPE vllm:num_preemptions counter",
            f"vllm:num_preemptions_total{{{labels}}} 0",
            "# TYPE vllm:iteration_tokens_total histogram",
            f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {self.server.steps}',
            f"vllm:iteration_tokens_total_count{{{labels}}} {self.server.steps}",
            f"vllm:iteration_tokens_total_sum{{{labels}}} {self.server.steps}",
            "# TYPE vtoken_evicted_tokens counter",
            f'vtoken_evicted_tokens_total{{{labels},policy="random"}} {self.server.steps // 2}',
        ]
        return "\n".join(lines) + "\n"

    def _is_admin(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {KEY}"

    def _body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _json(self, body: Any, status: int = 200) -> None:
        self._send(json.dumps(body).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _receipt(usage: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Half of the tokens evicted; ``lazy`` frees half of the blocks, ``naive`` none."""
    computed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    freed = computed // 16 // 2 if document["mode"] == "lazy" else 0
    evicted = computed // 2
    return {
        "policy": document["policy"],
        "num_sequences": 1,
        "evicted_tokens": evicted,
        "live_tokens": computed - evicted,
        "freed_blocks": freed,
        "policy_version": 1,
    }


@contextmanager
def running() -> Iterator[FakeService]:
    """The service in a thread."""
    with FakeService() as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
