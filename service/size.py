"""``vtoken-serve size``: how many requests of a length a GPU's KV pool holds, computed.

Pure arithmetic on the model's shape; nothing is loaded and nothing was measured. What the numbers
leave out is in :data:`ASSUMPTIONS`, which the command prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.errors import UsageError
from service.layer_memory import Limits, default_limits, layer_bytes
from vtoken.config import VTokenConfig

GIB = 1 << 30

GPU_MEMORY_GIB: Mapping[str, float] = {"l4": 22.5, "a100": 80.0, "h100": 79.6, "h200": 140.4}
"""What the driver reports, for the 80 GB models of A100 and H100."""

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152},
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064},
        **{"model_type": "qwen2", "tie_word_embeddings": False},
    },
    "llama-3.1-8b": {
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256},
        "tie_word_embeddings": False,
    },
}
"""The fields of published ``config.json`` files that sizing needs."""

ASSUMPTIONS = """\
Computed, not measured. `stock`: every token of every request is kept, in all `pool blocks`.
`packed`: live tokens lie without holes (F = 0). `at θ_F`: as many holes as relocation tolerates
before it acts. Both are in the `blocks left` by what the token layer keeps beside the pool. All
requests have the whole context at once. Weights follow from the shape; activations and CUDA graphs
are the reserve. A prompt is held whole until it is prefilled, so the pool must hold one context
anyway. The token layer was never run on a GPU: `packed` and `at θ_F` were not seen on one."""


@dataclass(frozen=True)
class ModelShape:
    """What a model costs in memory. ``num_parameters`` is ``None`` where it cannot be computed."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_parameters: int | None

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1) -> int:
        """K and V of one token over all layers on one GPU; heads are split, at least one each."""
        num_heads = -(-self.num_kv_heads // tensor_parallel)
        return 2 * num_heads * self.head_size * element_bytes * self.num_layers


@dataclass(frozen=True)
class Hardware:
    """GPUs of one replica and what of their memory is for the KV pool."""

    memory_gib: float
    tensor_parallel: int = 1
    utilization_ratio: float = 0.9
    reserve_gib: float = 2.0


@dataclass(frozen=True)
class Sizing:
    """Requests that fit at once, and the pool behind it; blocks are per GPU.

    Attributes:
        num_blocks: of vLLM's pool without the token layer.
        num_blocks_left: of its pool beside the token layer.
        blocks_per_request: that one context fills.
        num_stock: requests without eviction, in ``num_blocks``.
        num_packed, num_at_theta: with eviction, in ``num_blocks_left``.
    """

    num_blocks: int
    num_blocks_left: int
    blocks_per_request: int
    num_stock: int
    num_packed: int
    num_at_theta: int


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Hugging Face ``config.json``.

    Raises:
        UsageError: not a full-attention decoder, or a field is missing.
    """
    if "kv_lora_rank" in config:
        raise UsageError("the model stores latents (MLA), not K and V per token: cannot be sized")
    try:
        num_heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_size=int(config.get("head_dim") or hidden // num_heads),
            num_parameters=_num_parameters(config),
        )
    except KeyError as error:
        raise UsageError(f"the model's configuration has no {error.args[0]!r}") from error


def size(
    shape: ModelShape,
    hardware: Hardware,
    config: VTokenConfig,
    *,
    context_tokens: int,
    kept_bytes: int = 0,
    block_size: int = 16,
    weight_bytes: int | None = None,
    element_bytes: int = 2,
) -> Sizing:
    """How many requests of ``context_tokens`` fit, with and without the token layer.

    Args:
        config: budget or keep ratio, eviction interval, θ_F and headroom.
        kept_bytes: what the token layer keeps of the pool; see :func:`kept_beside`.
        weight_bytes: all weights; by default two bytes per parameter.
        element_bytes: bytes of one K or V number (2: bf16 and fp16, 1: fp8).

    Raises:
        UsageError: weights, or the token layer, leave no pool for one context, or the size of the
            weights cannot be computed.
    """
    if weight_bytes is None:
        if shape.num_parameters is None:
            raise UsageError("weights of mixture-of-experts models: give --weights-gib")
        weight_bytes = 2 * shape.num_parameters
    usable = hardware.memory_gib * hardware.utilization_ratio - hardware.reserve_gib
    pool = usable * GIB - weight_bytes / hardware.tensor_parallel
    block = block_size * shape.kv_bytes_per_token(element_bytes, hardware.tensor_parallel)
    num_blocks = int(pool // block)
    whole = -(-context_tokens // block_size)
    if num_blocks < whole:
        raise UsageError(
            f"the pool has {max(0, num_blocks)} blocks of {block_size} tokens, one request of "
            f"{context_tokens} tokens needs {whole}: take more memory or a shorter context"
        )
    num_left = int((pool - kept_bytes) // block)
    if num_left < whole:
        raise UsageError(
            f"the token layer keeps {kept_bytes / GIB:.2f} GiB of the pool and leaves "
            f"{max(0, num_left)} of {num_blocks} blocks, one request of {context_tokens} tokens "
            f"needs {whole}: lower --max-num-seqs or --max-model-len"
        )
    target = config.target_live_tokens(context_tokens) + config.evict_interval_tokens
    live = min(context_tokens, target)
    packed = -(-live // block_size)
    tolerated = min(whole, int(packed / (1 - config.theta_f)) + 1)
    usable_blocks = num_left - config.headroom_blocks
    return Sizing(
        num_blocks=num_blocks,
        num_blocks_left=num_left,
        blocks_per_request=whole,
        num_stock=num_blocks // whole,
        num_packed=usable_blocks // packed,
        num_at_theta=usable_blocks // tolerated,
    )


def kept_beside(shape: ModelShape, hardware: Hardware, limits: Limits, block_size: int = 16) -> int:
    """Bytes that the token layer keeps beside the pool of one GPU."""
    num_heads = -(-shape.num_heads // hardware.tensor_parallel)
    return layer_bytes(limits, block_size, shape.num_layers, num_heads, shape.head_size)


def read_config(model: str) -> Mapping[str, Any]:
    """The configuration of a known name, a model folder or a ``config.json``.

    Raises:
        UsageError: none of them.
    """
    if model in KNOWN_MODELS:
        return KNOWN_MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(KNOWN_MODELS)
        raise UsageError(
            f"{model} is neither {known}, nor a model folder, nor a config.json"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a model's configuration")
    return config


def main(argv: Sequence[str]) -> int:
    """Print the table for the given flags; returns the exit code.

    Raises:
        UsageError: the flags cannot be sized.
        ConfigError: a keep ratio or budget is out of bounds.
    """
    options = _make_parser().parse_args(argv)
    shape = model_shape(read_config(options.model))
    hardware = Hardware(
        options.memory_gib or GPU_MEMORY_GIB[options.gpu],
        options.tensor_parallel,
        options.utilization,
        options.reserve_gib,
    )
    weights = None if options.weights_gib is None else int(options.weights_gib * GIB)
    limits = _limits(options, hardware)
    kept = kept_beside(shape, hardware, limits, options.block_size)
    rows = []
    for context in options.context:
        for keep in _configs(options):
            sizing = size(
                shape,
                hardware,
                keep,
                context_tokens=context,
                kept_bytes=kept,
                block_size=options.block_size,
                weight_bytes=weights,
                element_bytes=options.kv_bytes,
            )
            rows.append([f"{context:,}", _keep_text(keep), *_cells(sizing)])
    per_token = shape.kv_bytes_per_token(options.kv_bytes, hardware.tensor_parallel)
    print(f"{options.model}: {per_token / 1024:.1f} KiB of KV per token and GPU")
    print(
        f"the token layer keeps {kept / GIB:.2f} GiB of each GPU beside the pool, with "
        f"--max-num-seqs {limits.max_num_seqs} --max-model-len {limits.max_model_len} "
        f"--max-num-batched-tokens {limits.max_num_batched_tokens}\n"
    )
    head = ("context", "kept", "pool blocks", "stock", "blocks left", "packed", "at θ_F")
    print(markdown(head, rows))
    print(f"\n{ASSUMPTIONS}")
    return 0


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def document_table() -> str:
    """The table of docs/deploy.md: models × GPUs × contexts × keep ratios."""
    cases = (
        *(("qwen2.5-7b", "l4", 1, c) for c in (4096, 8192)),
        *(("llama-3.1-8b", "h100", 1, c) for c in (8192, 32768, 131072)),
        *(("llama-3.1-8b", "h200", 1, c) for c in (8192, 32768, 131072)),
        *(("llama-3.1-70b", "h100", 4, c) for c in (8192, 32768, 131072)),
    )
    rows = []
    for model, gpu, parallel, context in cases:
        shape = model_shape(KNOWN_MODELS[model])
        hardware = Hardware(GPU_MEMORY_GIB[gpu], parallel)
        limits = default_limits(context, hardware.memory_gib, gpu)
        kept = kept_beside(shape, hardware, limits)
        name = f"{parallel} × {gpu.upper()}"
        for ratio in (0.5, 0.25):
            keep = VTokenConfig.from_dict({"keep_ratio": ratio})
            sizing = size(shape, hardware, keep, context_tokens=context, kept_bytes=kept)
            rows.append([model, name, f"{context:,}", f"{ratio:g}", *_cells(sizing)])
    head = ("Model", "GPU", "Context", "keep_ratio", "Pool blocks", "Stock", "Blocks left")
    return markdown((*head, "Packed", "At θ_F"), rows)


def _cells(sizing: Sizing) -> list[str]:
    numbers = (
        *(sizing.num_blocks, sizing.num_stock),
        *(sizing.num_blocks_left, sizing.num_packed, sizing.num_at_theta),
    )
    return [f"{number:,}" for number in numbers]


def _limits(options: argparse.Namespace, hardware: Hardware) -> Limits:
    """Those given, else vLLM's; the longest request is by default the longest context.

    Raises:
        UsageError: a context is longer than a request may be.
    """
    longest = options.max_model_len or max(options.context)
    if max(options.context) > longest:
        raise UsageError(f"--context {max(options.context)} is above --max-model-len {longest}")
    default = default_limits(longest, hardware.memory_gib, options.gpu)
    return Limits(
        longest,
        options.max_num_seqs or default.max_num_seqs,
        options.max_num_batched_tokens or default.max_num_batched_tokens,
    )


def _num_parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters of a Llama-like decoder with gated MLP; ``None`` for mixtures of experts."""
    if any(config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return None
    hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // num_heads)
    query = num_heads * head
    key_value = 2 * int(config.get("num_key_value_heads") or num_heads) * head
    has_bias = config.get("model_type") == "qwen2" or config.get("attention_bias", False)
    attention = hidden * (2 * query + key_value) + has_bias * (query + key_value)
    layer = attention + 3 * hidden * int(config["intermediate_size"]) + 2 * hidden
    num_embeddings = 1 if config.get("tie_word_embeddings", False) else 2
    embeddings = num_embeddings * int(config["vocab_size"]) * hidden
    return int(config["num_hidden_layers"]) * layer + hidden + embeddings


def _configs(options: argparse.Namespace) -> list[VTokenConfig]:
    own = {"theta_f": options.theta_f, "headroom_blocks": options.headroom_blocks}
    keeps = [{"budget_tokens": b} for b in options.budget_tokens]
    keeps += [{"keep_ratio": r} for r in options.keep_ratio]
    return [VTokenConfig.from_dict({**own, **keep}) for keep in keeps or [{"keep_ratio": 0.5}]]


def _keep_text(config: VTokenConfig) -> str:
    if config.budget_tokens is not None:
        return f"{config.budget_tokens:,} tokens"
    return f"{config.keep_ratio:.0%}"


def _make_parser() -> argparse.ArgumentParser:
    default = VTokenConfig()
    parser = argparse.ArgumentParser(
        prog="vtoken-serve size", description="How many requests fit into GPU memory (computed)."
    )
    add = parser.add_argument
    add("model", help=f"{', '.join(KNOWN_MODELS)}, a model folder, or a config.json")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--gpu", choices=sorted(GPU_MEMORY_GIB))
    memory.add_argument("--memory-gib", type=_positive, help="memory of one GPU")
    add("--tensor-parallel", type=_count, default=1, help="GPUs per replica (default 1)")
    add("--utilization", type=_positive, default=0.9, help="share for vLLM (default 0.9)")
    add("--reserve-gib", type=float, default=2.0, help="activations and graphs (default 2)")
    add("--weights-gib", type=_positive, help="default: 2 bytes per parameter")
    add("--kv-bytes", type=int, choices=(1, 2, 4), default=2, help="bytes per number (default 2)")
    add("--block-size", type=_count, default=16)
    add("--context", type=_count, nargs="+", default=[8192], metavar="TOKENS")
    add("--keep-ratio", type=float, nargs="+", default=[], metavar="RATIO")
    add("--budget-tokens", type=int, nargs="+", default=[], metavar="TOKENS")
    add("--theta-f", type=float, default=default.theta_f)
    add("--headroom-blocks", type=int, default=default.headroom_blocks)
    add("--max-num-seqs", type=_count, help="as given to serve (default: vLLM's for this GPU)")
    add("--max-model-len", type=_count, help="likewise (default: the longest --context)")
    add("--max-num-batched-tokens", type=_count, help="likewise (default: vLLM's for this GPU)")
    return parser


def _positive(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
