"""vLLM's private names around attention layers, the same on CPU and GPU and for both runners.

Read against vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum


@contextmanager
def attention_override(backend_name: str, class_path: str) -> Iterator[None]:
    """Let layers that are built inside the block use ``class_path`` as backend ``backend_name``.

    Layers ask for their backend once, when they are constructed, and keep it; the runner takes
    it from the layers afterwards. So the override may end with model loading, and another engine
    in this process stays stock. The selector's cache is emptied on both sides: it would hand a
    class chosen under the other rule to the next model.
    """
    backend = AttentionBackendEnum[backend_name]
    before = registry._ATTN_OVERRIDES.get(backend)
    registry.register_backend(backend, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        if before is None:
            backend.clear_override()
        else:
            registry.register_backend(backend, before)
        selector._cached_get_attn_backend.cache_clear()


def layer_names(kv_cache_config: Any) -> list[str]:
    """Names of the layers of the one KV cache group, in the order of the model."""
    (group,) = kv_cache_config.kv_cache_groups
    return sorted(group.layer_names, key=extract_layer_index)
