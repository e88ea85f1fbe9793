"""Stands before vLLM's ``generate``, where prompts are tokens and no answer has begun.

All routes that generate come through here, once for each prompt. What is refused here is a 400 of
vLLM's own making, for streams, too; what vLLM would refuse without a word gets words. On the way
out tokens are counted for the log; the stream of outputs is passed on as it is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import EngineInput
from vllm.v1.engine.exceptions import EngineGenerateError

from service import request_ids, tracing
from service.admission import QueueEstimate
from service.refusals import Refusals
from service.request_ids import RequestRecord

RECEIPT = "vtoken_receipt"

logger = logging.getLogger(__name__)


class Generation:
    """Replaces ``engine_client.generate``.

    Args:
        generate: vLLM's.
        queue: is told what was sent to the engine and what came back.
        refusals: is told of prompts that are too long.
        max_prompt_tokens, max_output_tokens: bounds; 0: none.
        has_token_layer: whether the engine keeps receipts.
    """

    def __init__(
        self,
        generate: Callable[..., AsyncGenerator[Any, None]],
        *,
        queue: QueueEstimate,
        refusals: Refusals,
        max_prompt_tokens: int,
        max_output_tokens: int,
        has_token_layer: bool,
    ) -> None:
        self._generate = generate
        self._queue = queue
        self._refusals = refusals
        self._max_prompt_tokens = max_prompt_tokens
        self._max_output_tokens = max_output_tokens
        self._has_token_layer = has_token_layer

    def __call__(
        self, prompt: EngineInput, sampling_params: Any, request_id: str, **others: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's, after a look at the prompt; mutates ``sampling_params``.

        Raises:
            VLLMValidationError: the prompt is too long; vLLM answers 400.
        """
        record = request_ids.current.get()
        self._check_prompt(prompt, record)
        if self._max_output_tokens:
            most = sampling_params.max_tokens or self._max_output_tokens
            sampling_params.max_tokens = min(most, self._max_output_tokens)
        if record is not None and self._has_token_layer:
            _ask_for_receipt(sampling_params, record)
        stream = self._generate(prompt, sampling_params, request_id, **others)
        return self._watched(stream, record, sampling_params.n)

    def _check_prompt(self, prompt: Any, record: RequestRecord | None) -> None:
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        length = len(tokens) if tokens is not None else 0
        if self._max_prompt_tokens and length > self._max_prompt_tokens:
            self._refusals.count("max_prompt_tokens")
            raise VLLMValidationError(
                f"the prompt has {length} tokens, and this server takes at most "
                f"{self._max_prompt_tokens}",
                parameter="prompt",
                value=length,
            )
        if record is not None:
            record.prompt_tokens += length

    async def _watched(
        self, stream: AsyncGenerator[Any, None], record: RequestRecord | None, num_sequences: int
    ) -> AsyncGenerator[Any, None]:
        """The stream, counted; closing it closes vLLM's, which ends the request in the engine."""
        counted: dict[int, int] = {}
        has_begun = False
        self._queue.sent(num_sequences)
        try:
            async for output in stream:
                has_begun = True
                for part in output.outputs:
                    counted[part.index] = counted.get(part.index, 0) + len(part.token_ids)
                yield output
        except EngineGenerateError as error:
            raise _explained(error, has_begun) from error
        finally:
            if not has_begun:
                self._queue.withdrawn(num_sequences)
            if record is not None:
                record.output_tokens += sum(counted.values())
            await stream.aclose()


def _explained(error: Exception, has_begun: bool) -> Exception:
    """vLLM raises it without text. Before the first output the cause is most often that a value
    cannot be encoded for the engine, half of a surrogate pair for instance."""
    cause = error.__cause__ or error
    found: Exception
    if not has_begun and isinstance(cause, ValueError | TypeError | OverflowError):
        found = VLLMValidationError(f"the request cannot be sent to the engine: {cause}")
    else:
        logger.error("vLLM could not go on with a request", exc_info=cause)
        found = EngineGenerateError(f"the engine could not go on with the request: {cause!r}")
    return found


def _ask_for_receipt(sampling_params: Any, record: RequestRecord) -> None:
    extra = sampling_params.extra_args or {}
    key = extra.get(RECEIPT) or record.receipt_key or tracing.receipt_key(record)
    if key:
        record.receipt_key = key
        sampling_params.extra_args = {**extra, RECEIPT: key}
