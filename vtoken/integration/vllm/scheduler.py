"""vLLM's scheduler with the token layer beside it.

``schedule`` runs vLLM's own decision first, then attaches our message; ``update_from_output``
settles relocations before vLLM looks at the output and evicts after it.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vtoken.integration.vllm.backpressure import Backpressure
from vtoken.integration.vllm.block_manager import VLLMBlockPool
from vtoken.integration.vllm.compat.scheduler_side import (
    SchedulerHooks,
    fail_requests,
    guard_allocations,
    is_running,
    limited_step,
)
from vtoken.integration.vllm.messages import ATTRIBUTE, StepMessage, StepReport
from vtoken.integration.vllm.options import (
    generation_of,
    options_of,
    read_options,
    set_generation,
)
from vtoken.integration.vllm.step import evict_due, step_message
from vtoken.integration.vllm.support import (
    check_groups,
    check_prefill,
    check_supported,
    vtoken_config,
)
from vtoken.request_kv import RequestKV
from vtoken.token_layer import TokenLayer
from vtoken.types import IdArray

logger = logging.getLogger(__name__)

NUM_REMEMBERED_RELOCATIONS = 32
_EXPECTED_ROWS = "vtoken_expected_rows"


class VTokenSchedulerMixin(SchedulerHooks):
    """The token layer on top of a vLLM scheduler class; see the two classes below."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Build vLLM's scheduler, then the token layer over its block pool.

        Raises:
            UnsupportedError: this model or configuration cannot be served with vToken.
            ConfigError: ``additional_config["vtoken"]`` is not valid, here or anywhere.
        """
        config = vtoken_config(vllm_config)
        check_supported(vllm_config)
        check_groups(kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        pool = VLLMBlockPool(self.kv_cache_manager)
        self.layer = TokenLayer(config, pool)
        self.layer.control.engine_check = partial(
            check_prefill, scheduler_config=vllm_config.scheduler_config
        )
        self.backpressure = Backpressure(self.layer, pool, lambda: len(self.running))
        self.recent_relocations: deque[dict[str, Any]] = deque(maxlen=NUM_REMEMBERED_RELOCATIONS)
        self.eviction_log: list[tuple[str, int, list[int]]] = []
        self.num_steps = 0
        self._refused: list[str] = []
        if config.record_evictions:
            self.layer.evictor.listener = self._record_eviction
        guard_allocations(self.kv_cache_manager, self.backpressure)

    def add_request(self, request: Request) -> None:
        """As vLLM's; a request that cannot be served ends with an error in the next step."""
        if not self._accepts(request):
            self._refused.append(request.request_id)
        set_generation(request, self.layer.evictor.documents.generation)
        super().add_request(request)

    def _accepts(self, request: Request) -> bool:
        """Whether it can be served; if not, the reason is logged."""
        if request.resumable:
            # Its prompt grows after its tokens were computed, some of them evicted.
            reason = "input that comes in several parts is not supported with vToken"
            logger.warning("request %s ends with an error: %s", request.request_id, reason)
            return False
        return read_options(request, self.layer.config.seed)

    # -- the step --------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's schedule, with a :class:`StepMessage` attached to its output."""
        release_documents(self.layer, self.requests)
        self.backpressure.step_begins()
        max_tokens = self.backpressure.max_step_tokens()
        if max_tokens is None:
            output = super().schedule(*args, **kwargs)
        else:
            with limited_step(self, max_tokens):
                output = super().schedule(*args, **kwargs)
        start = time.perf_counter()
        scheduled = output.num_scheduled_tokens
        message = step_message(self.layer, self.requests, scheduled, self._admit)
        setattr(output, ATTRIBUTE, message)
        if message.report_rows:
            setattr(output, _EXPECTED_ROWS, self.layer.verification.live_slots(scheduled))
        if output.total_num_scheduled_tokens:
            self.num_steps += 1
        self.backpressure.step_decided()
        self._overhead_seconds = time.perf_counter() - start
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Settle what the worker reports, let vLLM process the output, then evict."""
        start = time.perf_counter()
        report = getattr(model_runner_output, ATTRIBUTE, StepReport())
        for req_id, row in report.rows.items():
            expected = getattr(scheduler_output, _EXPECTED_ROWS)[req_id]
            self.layer.verification.check_row(req_id, expected, row)
        lost = self._settle(report)
        if lost:
            logger.error("relocation lost the K/V of requests %s: they end with an error", lost)
            fail_requests(self, model_runner_output, lost)
        if self._refused:
            fail_requests(self, model_runner_output, self._refused)
            self._refused = []
        middle = time.perf_counter()
        result = super().update_from_output(scheduler_output, model_runner_output)
        resumed = time.perf_counter()
        evict_due(
            self.layer,
            self.requests,
            scheduler_output.num_scheduled_tokens,
            is_running,
            getattr(scheduler_output, ATTRIBUTE, StepMessage()),
            report,
        )
        if self.layer.config.verify == "full":
            self.layer.verification.check_all()
        spent = self._overhead_seconds + (middle - start) + (time.perf_counter() - resumed)
        self.layer.stats.observe("scheduler_overhead_seconds", spent)
        return result

    def has_requests(self) -> bool:
        """Keep stepping until every copy is reported, so that no block stays taken."""
        return bool(super().has_requests() or self.layer.reclamation.awaits_reports)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's, which needs every block: relocations in flight give theirs back first."""
        self.layer.abandon_relocations()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    def _admit(self, request: Request) -> RequestKV:
        prompt = np.asarray(request.prompt_token_ids or (), np.int32)
        return self.layer.admit(
            request.request_id,
            request.num_prompt_tokens,
            prefill_end=request.num_tokens,
            request_seed=zlib.crc32(prompt.tobytes()),
            options=options_of(request),
            generation=generation_of(request),
            max_num_tokens=min(request.num_prompt_tokens + request.max_tokens, self.max_model_len),
        )

    def _settle(self, report: StepReport) -> list[str]:
        stats = self.layer.stats
        lost: list[str] = []
        if report.worker_seconds:
            stats.observe("worker_overhead_seconds", report.worker_seconds)
        damaged: dict[int, set[str]] = {}
        for digest in report.verified:
            if not self.layer.verification.check_conservation(
                digest.req_id, digest.num_tokens, digest.digest_before, digest.digest_after
            ):
                damaged.setdefault(digest.ticket, set()).add(digest.req_id)
        for copy in report.copies:
            lost += self.layer.settle(
                copy.ticket, copy.error, damaged.get(copy.ticket, ()), copy.stall_seconds
            )
            stats.observe("relocation_copy_seconds", copy.copy_seconds)
            stats.observe("relocation_stall_seconds", copy.stall_seconds)
            stats.inc("relocated_bytes_total", copy.num_bytes)
            self.recent_relocations.append(
                {
                    "ticket": copy.ticket,
                    "error": copy.error,
                    "copy_seconds": copy.copy_seconds,
                    "stall_seconds": copy.stall_seconds,
                    "num_bytes": copy.num_bytes,
                }
            )
        return lost

    def _record_eviction(self, kv: RequestKV, num_tokens: int, victims: IdArray) -> None:
        # Queries in flight still see the victims: they are gone for the ones scheduled next.
        self.eviction_log.append((kv.req_id, kv.num_tokens, victims.tolist()))

    # -- blocks ----------------------------------------------------------------------------

    def on_blocks_freed(self, request: Request) -> None:
        """Finished, aborted or preempted: the table goes with the blocks."""
        in_flight, ended = request.num_in_flight_tokens, request.is_finished()
        self.layer.forget(request.request_id, in_flight, ended=ended)

    def on_preempted(self, request: Request) -> None:
        """Count it; eviction state is rebuilt when the request is computed again."""
        self.layer.stats.inc("preemptions_total")
        if self.layer.config.record_evictions:  # nobody evicts nothing: a new life begins here
            self.eviction_log.append((request.request_id, request.num_computed_tokens, []))


def release_documents(layer: TokenLayer, requests: Mapping[str, Request]) -> None:
    """Forget policy documents whose last request has ended: what one of them asks for (chunks that
    are cut, evictions one by one) is done for all requests.

    Args:
        layer: changes.
        requests: all that have arrived and not ended.
    """
    if layer.control.keeps_documents:
        layer.control.release_documents({generation_of(r) for r in requests.values()})


class VTokenScheduler(VTokenSchedulerMixin, Scheduler):
    """For synchronous scheduling (vLLM's CPU engine)."""


class VTokenAsyncScheduler(VTokenSchedulerMixin, AsyncScheduler):
    """For asynchronous scheduling: one step ahead of the worker."""


def scheduler_for(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> VTokenSchedulerMixin:
    """``scheduler_cls`` of every engine: vLLM calls what it is given, and decides on asynchronous
    scheduling only after it was given.
    """
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = VTokenAsyncScheduler if is_async else VTokenScheduler
    return scheduler_class(vllm_config, *args, **kwargs)
