"""What stands before vLLM's ``generate``: bounds of the prompt and the answer, counts, receipts."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from service import request_ids
from service.admission import QueueEstimate
from service.pulse import Pulse
from service.refusals import Refusals
from service.request_ids import RequestRecord

PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3, 4, 5]}


@pytest.fixture(scope="module")
def generation() -> ModuleType:
    """The module, imported here: it imports vLLM, which takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from service import generation
    return generation


class Engine:
    """Gives two tokens per output, for two sequences, and notes how it was called."""

    def __init__(self, num_outputs: int = 3) -> None:
        self.calls: list[tuple[Any, Any, str, dict[str, Any]]] = []
        self.is_closed = False
        self._num_outputs = num_outputs

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **others: Any
    ) -> AsyncGenerator[Any, None]:
        self.calls.append((prompt, params, request_id, others))
        try:
            for _ in range(self._num_outputs):
                parts = [SimpleNamespace(index=i, token_ids=[7, 8]) for i in range(2)]
                yield SimpleNamespace(outputs=parts)
        finally:
            self.is_closed = True


def make(generation: ModuleType, engine: Engine, **bounds: Any) -> Any:
    values = {"max_prompt_tokens": 0, "max_output_tokens": 0, "has_token_layer": True, **bounds}
    values = {"queue": QueueEstimate(), "refusals": Refusals(), **values}
    return generation.Generation(engine.generate, **values)


def make_params(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_tokens": 50, "extra_args": None, "n": 2, **values})


def ask(
    generate: Any, params: Any, record: RequestRecord | None = None, take: int | None = None
) -> int:
    """Read ``take`` outputs, or all, as part of the request of ``record``; how many came."""

    async def run() -> int:
        token = request_ids.current.set(record)
        try:
            stream = generate(PROMPT, params, "cmpl-1", priority=3)
        finally:
            request_ids.current.reset(token)
        count = 0
        async for _ in stream:
            count += 1
            if count == take:
                break
        await stream.aclose()
        return count

    return asyncio.run(run())


def test_everything_passes_where_there_are_no_bounds(generation: ModuleType) -> None:
    """Arguments and outputs as they are; without a request, too."""
    engine, params = Engine(), make_params()
    assert ask(make(generation, engine), params) == 3
    assert engine.calls == [(PROMPT, params, "cmpl-1", {"priority": 3})]
    assert params == make_params()


def test_tokens_are_counted_for_the_log(generation: ModuleType) -> None:
    """Of the prompt once, of the answer over outputs and sequences; added over prompts."""
    record = RequestRecord("r", "POST", "/v1/completions")
    generate = make(generation, Engine())
    ask(generate, make_params(), record)
    assert (record.prompt_tokens, record.output_tokens) == (5, 12)
    ask(generate, make_params(), record)
    assert (record.prompt_tokens, record.output_tokens) == (10, 24)


def test_long_prompt_is_refused_before_the_engine_and_before_a_stream(
    generation: ModuleType,
) -> None:
    """By an error that vLLM answers with 400, at the call itself."""
    from vllm.exceptions import VLLMValidationError

    engine, refusals = Engine(), Refusals()
    bounds: dict[str, Any] = {"max_prompt_tokens": 5, "refusals": refusals}
    assert ask(make(generation, engine, **bounds), make_params()) == 3
    assert not any(refusals.totals().values())
    with pytest.raises(VLLMValidationError, match="5 tokens") as caught:
        make(generation, engine, **bounds | {"max_prompt_tokens": 4})(PROMPT, make_params(), "x")
    assert refusals.totals()["max_prompt_tokens"] == 1
    assert caught.value.parameter == "prompt"
    assert len(engine.calls) == 1


@pytest.mark.parametrize(("asked", "given"), [(50, 20), (10, 10), (None, 20)])
def test_answer_is_bounded(generation: ModuleType, asked: int | None, given: int) -> None:
    """What was left open becomes the bound."""
    params = make_params(max_tokens=asked)
    ask(make(generation, Engine(), max_output_tokens=20), params)
    assert params.max_tokens == given


def test_closing_the_stream_closes_the_engines(generation: ModuleType) -> None:
    """That is how a request is aborted; what had come is counted."""
    engine, record = Engine(num_outputs=1000), RequestRecord("r", "POST", "/")
    assert ask(make(generation, engine), make_params(), record, take=1) == 1
    assert engine.is_closed
    assert record.output_tokens == 4


def test_receipt_is_asked_for_if_somebody_wants_it(generation: ModuleType) -> None:
    """By the client's key, else by one for the trace; never without the token layer."""
    traced = RequestRecord("r", "POST", "/", trace_id="ab" * 16)
    params = make_params(extra_args={"x": 1})
    ask(make(generation, Engine()), params, traced)
    assert params.extra_args == {"x": 1, "vtoken_receipt": traced.receipt_key}
    assert len(traced.receipt_key) == 32
    second = make_params()
    ask(make(generation, Engine()), second, traced)
    assert second.extra_args == {"vtoken_receipt": traced.receipt_key}, "sums over the prompts"
    own = RequestRecord("r", "POST", "/")
    ask(make(generation, Engine()), make_params(extra_args={"vtoken_receipt": "k"}), own)
    assert own.receipt_key == "k"
    plain = make_params()
    ask(make(generation, Engine()), plain, RequestRecord("r", "POST", "/"))
    ask(make(generation, Engine(), has_token_layer=False), plain, traced)
    assert plain.extra_args is None


def test_queue_hears_of_what_is_sent_and_withdrawn(generation: ModuleType) -> None:
    """A request that ends without an output was never started."""
    queue = QueueEstimate()
    queue.note(Pulse(0, 0, 0), 0.0)
    ask(make(generation, Engine(), queue=queue), make_params())
    ask(make(generation, Engine(num_outputs=0), queue=queue), make_params())
    queue.note(Pulse(running=1, waiting=1, steps=1), 1.0)
    assert queue.wait_seconds() == pytest.approx(2.0), "one of two sequences has begun in a second"


class Failing(Engine):
    """Raises vLLM's wordless error for a cause, after some outputs."""

    def __init__(self, cause: Exception, num_outputs: int) -> None:
        super().__init__(num_outputs)
        self._cause = cause

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **others: Any
    ) -> AsyncGenerator[Any, None]:
        from vllm.v1.engine.exceptions import EngineGenerateError

        async for output in super().generate(prompt, params, request_id, **others):
            yield output
        raise EngineGenerateError() from self._cause


@pytest.mark.parametrize(
    ("cause", "num_outputs", "kind", "words"),
    [
        (
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
            0,
            "VLLMValidation",
            "surrogates not allowed",
        ),
        (OverflowError("int too big"), 0, "VLLMValidation", "int too big"),
        (ValueError("late"), 1, "EngineGenerate", "ValueError('late')"),
        (KeyError("x"), 0, "EngineGenerate", "KeyError('x')"),
    ],
)
def test_wordless_error_of_vllm_gets_words(
    generation: ModuleType, cause: Exception, num_outputs: int, kind: str, words: str
) -> None:
    """What cannot be encoded for the engine is the client's; anything else the server's."""
    call = make(generation, Failing(cause, num_outputs))
    with pytest.raises(Exception, match="engine") as caught:
        ask(call, make_params())
    assert type(caught.value).__name__ == f"{kind}Error"
    assert words in str(caught.value)
