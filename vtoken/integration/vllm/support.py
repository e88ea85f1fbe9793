"""What can be served with vToken, decided before anything is allocated.

Every refusal names the setting and the reason; ``--vtoken-mode off`` lifts all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.integration.vllm.attention_gpu_choice import KV_CACHE_DTYPES
from vtoken.integration.vllm.compat import check_vllm_version

CONFIG_KEY = "vtoken"
"""Key of our settings inside vLLM's ``additional_config``."""

_NOT_PARALLEL = {
    "pipeline_parallel_size": "stages run different steps at once, and only the last one reports",
    "decode_context_parallel_size": "ranks hold different tokens of one request",
    "prefill_context_parallel_size": "ranks hold different tokens of one request",
}
"""Tensor parallelism is not among them: its ranks hold the same tokens, and the heads apart. Nor
is data parallelism, whose engines share nothing, unless the model has experts."""


def vtoken_config(vllm_config: VllmConfig) -> VTokenConfig:
    """Our settings, as they travelled inside vLLM's configuration.

    Raises:
        ConfigError: they are not valid.
        UnsupportedError: there are none, so the engine was not set up through us.
    """
    values = (vllm_config.additional_config or {}).get(CONFIG_KEY)
    if values is None:
        raise UnsupportedError(
            f"additional_config has no {CONFIG_KEY!r}: start through vtoken-serve or pass "
            "vtoken.integration.vllm.plugin.engine_args(config) to the engine"
        )
    return VTokenConfig.from_dict(values)


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse configurations that the token layer cannot serve correctly.

    Raises:
        UnsupportedError: lists every reason, not only the first.
        ConfigError: as :func:`check_prefill`.
    """
    check_vllm_version()
    _raise_if(list(_config_reasons(vllm_config)))
    check_prefill(vtoken_config(vllm_config), vllm_config.scheduler_config)


def check_prefill(config: VTokenConfig, scheduler_config: SchedulerConfig) -> None:
    """Refuse eviction between the chunks of a prompt where no prompt is cut into chunks.

    A step's tokens are then limited to what is free, and a longer prompt would wait for ever.

    Raises:
        ConfigError: names ``evict_during_prefill``.
    """
    if config.evict_during_prefill and not scheduler_config.enable_chunked_prefill:
        bound = "false while vLLM's chunked prefill is off (--no-enable-chunked-prefill)"
        raise ConfigError("evict_during_prefill", True, bound)


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse models whose attention is not plain full attention in one KV cache group.

    Raises:
        UnsupportedError: lists every reason.
    """
    _raise_if(list(_group_reasons(kv_cache_config)))


def check_score_layers(config: VTokenConfig, num_layers: int) -> None:
    """Refuse sampled layers that the model does not have.

    Raises:
        ConfigError: names the number of layers.
    """
    layers = config.score_layers
    if layers is not None and layers[-1] >= num_layers:
        raise ConfigError("score_layers", layers, f"layers of this model are 0 … {num_layers - 1}")


def _raise_if(reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedError(
            "vToken cannot serve this: " + "; ".join(reasons) + ". Use --vtoken-mode off."
        )


def _config_reasons(config: VllmConfig) -> Iterator[str]:
    model, parallel = config.model_config, config.parallel_config
    yield from _platform_reasons(config)
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r}: only text generation has a KV cache to evict from"
    if model.use_mla:
        yield "multi-head latent attention (MLA) stores latents, not K and V per token"
    if model.is_hybrid:
        yield "hybrid and state-space models keep state that is not per token"
    if model.is_encoder_decoder:
        yield "encoder-decoder models have cross-attention blocks"
    if model.is_multimodal_model:
        yield "multimodal models are not supported"
    if config.speculative_config is not None:
        yield "speculative decoding rolls computed tokens back"
    if config.kv_transfer_config is not None:
        yield "KV connectors read and write blocks on their own schedule"
    for name, reason in _NOT_PARALLEL.items():
        size = getattr(parallel, name)
        if size > 1:
            yield f"{name}={size}, must be 1: {reason}"
    if parallel.data_parallel_size > 1 and model.is_moe:
        size = parallel.data_parallel_size
        yield f"data_parallel_size={size} with experts, whose engines compute every step together"
    if parallel.enable_fault_tolerance:
        yield "fault tolerance goes on after a step whose report of copies is lost"
    if parallel.use_ubatching:
        yield "dual batch overlap splits a batch behind the scheduler's back"


def _platform_reasons(config: VllmConfig) -> Iterator[str]:
    dtype = config.cache_config.cache_dtype
    if current_platform.is_cpu():
        if dtype not in ("auto", "bfloat16", "float16"):
            yield f"kv_cache_dtype={dtype!r} has no token-granular CPU kernel"
        return
    if not current_platform.is_cuda():
        yield f"platform {current_platform.device_name}: only CPUs and CUDA are supported"
        return
    # What depends on the GPU itself is decided by attention_gpu_choice, in the worker.
    if dtype not in KV_CACHE_DTYPES:
        yield f"kv_cache_dtype={dtype!r} is not proven on GPUs, only {', '.join(KV_CACHE_DTYPES)}"
    if config.model_config.enable_sleep_mode:
        yield "sleep mode, which takes the KV cache away and gives it back, is not proven on GPUs"
    if config.attention_config.backend_per_kind:
        yield "attention_config.backend_per_kind: live tokens are read by one backend"


def _group_reasons(config: KVCacheConfig) -> Iterator[str]:
    groups = config.kv_cache_groups
    if len(groups) != 1:
        yield f"{len(groups)} KV cache groups, must be 1"
    for group in groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
            yield f"attention of type {type(spec).__name__}, must be FullAttentionSpec"
        elif spec.sliding_window is not None:
            yield f"sliding window of {spec.sliding_window} tokens"
        elif spec.attention_chunk_size is not None:
            yield f"chunked attention of {spec.attention_chunk_size} tokens"
        elif spec.non_causal:
            yield "non-causal attention"
