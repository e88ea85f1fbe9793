"""A two-layer Llama with random weights: a real engine whose steps cost milliseconds.

Made on first use and kept in the cache folder, never committed. What it says means nothing; that
it runs through vLLM's own model code, with K/V that differ from token to token, is the point.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from service.settings.environment import default_cache_dir

VOCABULARY = 1024
HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 2
BYTES_PER_TOKEN = NUM_LAYERS * 2 * (HIDDEN_SIZE // NUM_HEADS) * 2
"""K and V of the one KV head in bf16."""
HEAD_SIZE = HIDDEN_SIZE // NUM_HEADS
MAX_POSITIONS = 65536
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of its engine. Its matrices are too small to be shared out: on a busy machine threads that wait
for each other make a step twenty times slower than one thread alone."""


def ensure_tiny_model(
    cache_dir: Path | None = None, *, num_heads: int = NUM_HEADS, num_kv_heads: int = 1
) -> Path:
    """Folder of the model, made if it is not there; whole or absent, as for the embedded one.

    Args:
        cache_dir: where models are kept.
        num_heads, num_kv_heads: for tensor parallelism, whose ranks share the heads out.
    """
    cache = cache_dir or default_cache_dir()
    name = f"tiny-llama-{NUM_LAYERS}x{num_heads * HEAD_SIZE}-v{VOCABULARY}-kv{num_kv_heads}"
    name += f"-p{MAX_POSITIONS}"
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=cache))
    try:
        _build(unfinished, num_heads, num_kv_heads)
        with contextlib.suppress(OSError):  # another process was faster: its folder is the same
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _build(folder: Path, num_heads: int, num_kv_heads: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=num_heads * HEAD_SIZE,
        intermediate_size=2 * num_heads * HEAD_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,  # sharp enough that attention and tokens depend on the context
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
