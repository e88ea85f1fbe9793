"""A bounded load for the live test: conversations of several lengths, streamed."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import dataclass, field

WORDS = "the quick brown fox jumps over the lazy dog while seven wizards quietly boil tea "


@dataclass
class Stream:
    """One streamed completion, read in a thread of its own."""

    url: str
    api_key: str
    num_words: int
    max_tokens: int
    chunks: list[str] = field(default_factory=list)
    error: str = ""

    def start(self) -> threading.Thread:
        """Begin reading."""
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        return thread

    @property
    def is_whole(self) -> bool:
        """Whether the stream ended as it should, with every token asked for."""
        return not self.error and self.chunks[-1:] == ["[DONE]"]

    def _read(self) -> None:
        prompt = (WORDS * (1 + self.num_words // 16))[: self.num_words * 5]
        body = {
            "model": json.loads(self._call("/v1/models"))["data"][0]["id"],
            "prompt": f"{time.monotonic()} {prompt}",
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            request = self._request("/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=300) as answer:
                for line in answer:
                    if line.startswith(b"data: "):
                        self.chunks.append(line[6:].strip().decode())
        except Exception as error:
            self.error = repr(error)

    def _call(self, path: str) -> bytes:
        with urllib.request.urlopen(self._request(path), timeout=300) as answer:
            body: bytes = answer.read()
        return body

    def _request(self, path: str, data: bytes | None = None) -> urllib.request.Request:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        return urllib.request.Request(self.url + path, data=data, headers=headers)
