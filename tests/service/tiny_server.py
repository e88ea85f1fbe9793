"""A real server with the tiny model: starts in seconds, answers in milliseconds.

Prompts are words ``w3`` … ``w1023``, one token each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.engine.tiny_model import BYTES_PER_TOKEN, ENVIRONMENT, VOCABULARY, ensure_tiny_model
from tests.service.server_process import ServerProcess, wait_for

MODEL = "tiny"
ADMIN_KEY = "test-admin-key"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
MAX_MODEL_LEN = 32768
LASTING_TOKENS = 30_000
"""An answer that has not ended while a test looks at it: more than a minute at 400 tokens a second.
Who asks for it hangs up, or stops the server."""
FLAGS = (
    "--enforce-eager",
    *("--served-model-name", MODEL),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--kv-cache-memory-bytes", str(MAX_MODEL_LEN * BYTES_PER_TOKEN * 5 // 4)),
    *("--max-num-seqs", "64"),
    *("--vtoken-budget-tokens", "96"),
    *("--vtoken-theta-f", "0.1"),
    *("--vtoken-low-watermark-ratio", "1.0"),
)


def make_model_folder(folder: Path) -> Path:
    """The tiny model with a tokenizer that knows one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(ensure_tiny_model(), folder)
    words = {f"w{number}": number for number in range(3, VOCABULARY)}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **words}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)
    fast.save_pretrained(folder)
    return folder


def words(count: int, start: int = 3) -> str:
    """A prompt of ``count`` tokens."""
    span = VOCABULARY - 3
    return " ".join(f"w{3 + (start + number) % span}" for number in range(count))


class TinyServer(ServerProcess):
    """With the tiny model, which it makes in ``folder``."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        own = {n: v for n, v in os.environ.items() if not n.startswith(("VTOKEN_", "OTEL_"))}
        own |= {n: v for n, v in os.environ.items() if n in ("VTOKEN_CACHE_DIR",)}
        iomp = Path(sys.prefix) / "lib" / "libiomp5.so"
        own |= {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VTOKEN_ADMIN_KEY": ADMIN_KEY}
        own |= {"VTOKEN_ENGINE_TIMEOUT_SECONDS": "300"}  # a loaded machine is not a fault
        own |= {"LD_PRELOAD": str(iomp)} if iomp.exists() else {}
        model = str(make_model_folder(folder / "model"))
        super().__init__(folder / "log.txt", [model, *FLAGS, *flags], {**own, **environment})

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of its log; the last may be half written."""
        *whole, _ = self.text().split("\n")
        return [json.loads(line) for line in whole if line.startswith('{"time"')]

    def access(self, request_id: str) -> dict[str, Any]:
        """The line that ended a request."""
        return wait_for(
            lambda: next(
                (
                    line
                    for line in self.lines()
                    if line["logger"] == "service.access" and line["request_id"] == request_id
                ),
                None,
            ),
            120,
        )

    def wait_until_ready(self) -> None:
        """Until the ready line, and the first answer of the engine."""
        super().wait_until_ready()
        wait_for(lambda: self.get("/health/ready").status_code == 200)

    def worker(self) -> psutil.Process:
        """The process that computes, of the first engine."""
        return self.workers()[0]

    def workers(self) -> list[psutil.Process]:
        """Of each engine: the engine core's child with the most memory."""
        cores = [core.children() for core in self.named("EngineCore")]
        return [max(found, key=lambda process: process.memory_info().rss) for found in cores]

    def post(self, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        """POST."""
        return httpx.post(self.url + path, timeout=300, **options)

    def complete(self, prompt: str, max_tokens: int, **options: Any) -> httpx.Response:
        """A whole answer of exactly ``max_tokens``."""
        return self.post(json=body(prompt, max_tokens), **options)

    def state(self) -> dict[str, Any]:
        """``GET /admin/state``."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return self.get("/admin/state", headers=headers).raise_for_status().json()

    def ready(self) -> tuple[int, set[str]]:
        """Status of the readiness probe, and the codes of its reasons."""
        answer = self.get("/health/ready")
        listed = answer.json().get("reasons", []) + answer.json().get("degraded", [])
        return answer.status_code, {reason["code"] for reason in listed}

    def is_quiet(self) -> bool:
        """No request, and every block free."""
        state = self.state()
        pool = state["pool"]
        return not state["requests"] and pool["free_blocks"] == pool["total_blocks"]


def body(prompt: str, max_tokens: int, **others: Any) -> dict[str, Any]:
    """Of ``POST /v1/completions``."""
    fixed = {"model": MODEL, "ignore_eos": True, "temperature": 0}
    return {**fixed, "prompt": prompt, "max_tokens": max_tokens, **others}


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream as they come; ends at ``[DONE]``.

    Raises:
        AssertionError: the stream ended without it.
    """
    rest = b""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")  # U+2028 in an answer ends no line
        for line in lines:
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended early")
