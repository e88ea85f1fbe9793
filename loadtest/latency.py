"""Client-side latencies of answers, under the field names of ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.statistics import percentile


@dataclass(frozen=True)
class Answer:
    """What came back for one request; times are seconds of one monotonic clock.

    Attributes:
        start: when the request was sent.
        chunk_times: when each event that carried tokens arrived; vLLM may merge tokens.
        end: when the stream ended.
        num_prompt_tokens: as the server counted them.
        num_output_tokens: likewise.
        token_ids: of the answer.
        text: of the answer; empty where the server has no tokenizer.
        finish_reason: ``stop`` or ``length``.
        receipt: the token layer's, where asked for.
        error: why the request failed; empty if it did not.
    """

    start: float
    end: float
    chunk_times: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    receipt: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunk_times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token."""
        return self.chunk_times[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; ``None`` for answers of one token."""
        later = self.num_output_tokens - 1
        return (self.latency - self.ttft) / later if later > 0 else None


@dataclass(frozen=True)
class Goals:
    """Service level of one request, in milliseconds; ``None``: no such goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def are_met(self, answer: Answer) -> bool:
        """Whether the answer came within every goal."""
        tpot = answer.tpot or 0.0
        pairs = ((self.ttft_ms, answer.ttft), (self.tpot_ms, tpot), (self.e2el_ms, answer.latency))
        return all(goal is None or 1e3 * seconds <= goal for goal, seconds in pairs)


def summarize(answers: Sequence[Answer], goals: Goals | None = None) -> dict[str, float]:
    """Throughput, and mean, median, p95 and p99 of TTFT, TPOT, ITL and E2EL in milliseconds.

    Failed requests count in ``failed`` alone. The duration runs from the first request sent to
    the last token received.
    """
    good = [a for a in answers if not a.error and a.chunk_times]
    if not good:
        return {"completed": 0.0, "failed": float(len(answers))}
    seconds = max(a.chunk_times[-1] for a in good) - min(a.start for a in good)
    seconds = max(seconds, 1e-9)
    num_output = sum(a.num_output_tokens for a in good)
    num_total = num_output + sum(a.num_prompt_tokens for a in good)
    times = {
        "ttft": [a.ttft for a in good],
        "tpot": [a.tpot for a in good if a.tpot is not None],
        "itl": [float(gap) for a in good for gap in np.diff(a.chunk_times)],
        "e2el": [a.latency for a in good],
    }
    return {
        "completed": float(len(good)),
        "failed": float(len(answers) - len(good)),
        "duration": seconds,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum((goals or Goals()).are_met(a) for a in good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": num_total / seconds,
        **{k: v for name, values in times.items() for k, v in _spread(name, values).items()},
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * s for s in seconds]
    return {
        f"mean_{name}_ms": float(np.mean(ms)) if ms else 0.0,
        f"median_{name}_ms": percentile(ms, 50),
        f"p95_{name}_ms": percentile(ms, 95),
        f"p99_{name}_ms": percentile(ms, 99),
    }
