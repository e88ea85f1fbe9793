"""Metrics that ``/metrics`` gives and no dashboard shows, each with the reason.

Keys are names as Prometheus has them, or patterns of ``fnmatch``. The tests compare them with what
the running service emits: a metric that is new or renamed must be shown, or get a line here.
"""

from __future__ import annotations

NOT_SHOWN: dict[str, str] = {
    "vtoken_headroom_backpressure_total": "counts steps; the seconds beside it say more",
}
"""Ours."""

NOT_SHOWN_OF_OTHERS: dict[str, str] = {
    "*_created": "when a counter began; rate() needs no such help",
    "process_*": "the HTTP process alone; the kubelet measures the pod",
    "python_*": "the HTTP process's interpreter",
    "http_request_size_bytes": "the tokens of a request say more",
    "http_response_size_bytes": "the tokens of a request say more",
    "http_request_duration_*": "vLLM's latencies say more, and in phases",
    "vllm:admission_rejections_total": "vLLM's own bounds on its queue; they count as HTTP 4xx",
    "vllm:cache_config_info": "settings, for looking up",
    "vllm:corrupted_requests_total": "only with VLLM_COMPUTE_NANS_IN_LOGITS",
    "vllm:engine_sleep_state": "the routes that put an engine to sleep are not served",
    "vllm:estimated_*": "only with --enable-mfu-metrics",
    "vllm:external_prefix_cache_*": "only with a KV connector",
    "vllm:iteration_tokens_total": "the tokens per second say more",
    "vllm:kv_block_*": "only with --kv-cache-metrics",
    "vllm:lora_requests_info": "names of adapters as labels; only with --enable-lora",
    "vllm:mm_cache_*": "only of models that see or hear",
    "vllm:num_requests_kv_fetch_by_stage": "only with a KV connector",
    "vllm:prompt_tokens_by_source_total": "the prefix cache's share is shown",
    "vllm:prompt_tokens_cached*": "the prefix cache's share is shown",
    "vllm:request_inference_time_seconds": "the sum of prefill and decode, which are shown",
    "vllm:request_max_num_generation_tokens": "what was generated is shown",
    "vllm:request_num_preemptions": "preemptions per second are shown",
    "vllm:request_params_*": "what clients asked for, not what they got",
    "vllm:request_prefill_kv_computed_tokens": "the prefix cache's share is shown",
    "vllm:request_time_per_output_token_seconds": "the time between tokens, without its spread",
    "vllm:tool_call_parser_invocations_total": "of interest while a parser is written",
    "vllm:watermark_requests_total": "only with watermarking",
}
"""vLLM's and those of the libraries beneath."""
