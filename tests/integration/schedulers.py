"""vLLM's real scheduler with the token layer, without engine and worker, for tests."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.tiny_model import ensure_tiny_model
from vtoken.config import VTokenConfig
from vtoken.integration.vllm.plugin import engine_args
from vtoken.integration.vllm.scheduler import VTokenScheduler

SIZE = 16
KEEPS_ALL = {"policy": "none", "headroom_blocks": 4}


def make_scheduler(
    num_blocks: int, order: str = "fcfs", engine: dict[str, Any] | None = None, **fields: Any
) -> VTokenScheduler:
    """A scheduler over ``num_blocks`` usable blocks, as the engine core makes it.

    Args:
        num_blocks: of the pool.
        order: who runs first, vLLM's scheduling policy.
        engine: more arguments of vLLM.
        fields: of our configuration, besides :data:`KEEPS_ALL`.
    """
    config = VTokenConfig.from_dict({**KEEPS_ALL, **fields})
    args = EngineArgs(
        **{
            "model": str(ensure_tiny_model()),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "scheduling_policy": order,
            "enforce_eager": True,
            **engine_args(config),
            **(engine or {}),
        }
    )
    vllm_config = args.create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = num_blocks + 1
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    cache = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return VTokenScheduler(vllm_config, cache, StructuredOutputManager(vllm_config), SIZE)


def add(
    scheduler: VTokenScheduler,
    req_id: str,
    num_blocks: int,
    priority: int = 0,
    resumable: bool = False,
    **params: Any,
) -> Request:
    """A request whose prompt fills ``num_blocks`` blocks; ``params`` are of its sampling."""
    sampling = SamplingParams(**{"max_tokens": 200, "ignore_eos": True, **params})
    prompt = [7] * (num_blocks * SIZE)
    request = Request(
        req_id,
        prompt,
        sampling,
        None,
        arrival_time=0.0,
        priority=priority,
        resumable=resumable,
    )
    scheduler.add_request(request)
    return request


def step(scheduler: VTokenScheduler, **fields: Any) -> set[str]:
    """One engine step with a worker that computes everything; who ran in it."""
    return set(step_and_outputs(scheduler, **fields)[0])


def step_and_outputs(
    scheduler: VTokenScheduler, **fields: Any
) -> tuple[list[str], dict[str, EngineCoreOutput]]:
    """:func:`step`: who ran in it, and what their clients are told.

    Args:
        scheduler: scheduler.
        fields: of the worker's output, besides one token for each request that is prefilled.
    """
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[req_id] for req_id in ids]
    is_prefilled = [r.num_computed_tokens >= r.num_tokens for r in requests]
    done = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
        sampled_token_ids=[[1] if ready else [] for ready in is_prefilled],
        **fields,
    )
    told = scheduler.update_from_output(output, done)
    return ids, {out.request_id: out for outs in told.values() for out in outs.outputs}
