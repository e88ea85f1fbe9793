"""Who may use which route: the one table, vLLM's routes included.

A route that is not in it is not served to everybody: with API keys it needs one, and without it is
closed. A test builds the whole app and fails on a route that nobody has classified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from starlette.routing import compile_path
from starlette.types import Scope


class Access(Enum):
    """What a route asks for."""

    PUBLIC = "public"
    """Nothing: it tells whether the server works, and which version it is."""
    METRICS = "metrics"
    """Nothing, or an API or admin key, as ``metrics_key_required`` says."""
    API = "api"
    """An API key, if any is configured."""
    ADMIN = "admin"
    """An admin key; closed while none is configured."""
    ADMIN_PAGE = "admin page"
    """Nothing, but it stands where the admin routes are: it is a page that asks for a key."""
    DENIED = "denied"
    """Never served."""
    UNKNOWN = "unknown"
    """Not in the table."""


ROUTES: Mapping[Access, tuple[str, ...]] = {
    Access.PUBLIC: (
        "/health",
        "/health/live",
        "/health/ready",
        "/health/startup",
        "/ping",
        "/version",
    ),
    Access.METRICS: ("/metrics", "/metrics/{path:path}", "/load"),
    Access.API: (
        "/classify",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/detokenize",
        "/docs",
        "/docs/oauth2-redirect",
        "/generative_scoring",
        "/inference/v1/abort_requests",
        "/inference/v1/generate",
        "/invocations",
        "/kv_event_sources",
        "/openapi.json",
        "/pooling",
        "/redoc",
        "/rerank",
        "/score",
        "/static/{path:path}",
        "/tokenize",
        "/tokenizer_info",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/v1/realtime",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    ),
    Access.ADMIN: (
        "/adapters",
        "/adapters/{adapter_name}",
        "/admin/blocks",
        "/admin/policies",
        "/admin/policy",
        "/admin/policy/history",
        "/admin/policy/rollback",
        "/admin/state",
        "/fault_tolerance/apply",
        "/fault_tolerance/status",
        "/is_scaling_elastic_ep",
        "/scale_elastic_ep",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
    Access.ADMIN_PAGE: ("/vtoken/ui", "/vtoken/ui/fields", "/vtoken/ui/{name}"),
    Access.DENIED: (  # what vLLM serves with VLLM_SERVER_DEV_MODE
        "/abort_requests",
        "/collective_rpc",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_sleeping",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
    ),
}
"""Path templates by what they ask for."""

TABLE: Mapping[str, Access] = {path: access for access, paths in ROUTES.items() for path in paths}

_TEMPLATES: tuple[tuple[re.Pattern[str], Access], ...] = tuple(
    (compile_path(path)[0], access) for path, access in TABLE.items() if "{" in path
)


def access_of(path: str) -> Access:
    """What a request to ``path`` (without the proxy's prefix) needs.

    Everything under ``/admin`` needs an admin key, also what is not there: nobody else learns
    what is.
    """
    found = TABLE.get(path)
    if found is not None:
        return found
    for pattern, access in _TEMPLATES:
        if pattern.fullmatch(path):
            return access
    return Access.ADMIN if path.startswith("/admin/") or path == "/admin" else Access.UNKNOWN


def route_path(scope: Scope) -> str:
    """The path that the router will match: without the proxy's prefix, if it is there."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    inside = root and (path == root or path.startswith(root.rstrip("/") + "/"))
    return path[len(root.rstrip("/")) :] if inside else path
