"""Sizing: known shapes, monotone answers, honest refusals, and the table in the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import size as sizing
from service.errors import UsageError
from service.layer_memory import Limits
from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
H100 = sizing.Hardware(79.6)
LLAMA = sizing.model_shape(sizing.KNOWN_MODELS["llama-3.1-8b"])


def make_config(**values: object) -> VTokenConfig:
    return VTokenConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "num_parameters", "kib_per_token"),
    [
        ("smollm2-135m", 134_515_008, 22.5),
        ("qwen2.5-7b", 7_615_616_512, 56),
        ("llama-3.1-8b", 8_030_261_248, 128),
        ("llama-3.1-70b", 70_553_706_496, 320),
    ],
)
def test_known_models_have_their_published_size(name, num_parameters, kib_per_token):
    """Parameter counts and KV bytes per token are the published ones."""
    shape = sizing.model_shape(sizing.KNOWN_MODELS[name])
    assert shape.num_parameters == num_parameters
    assert shape.kv_bytes_per_token(2) == kib_per_token * 1024


def test_tensor_parallel_splits_heads_and_never_below_one():
    """More GPUs than KV heads keep one head each."""
    assert LLAMA.kv_bytes_per_token(2, 4) == LLAMA.kv_bytes_per_token(2) // 4
    assert LLAMA.kv_bytes_per_token(2, 16) == LLAMA.kv_bytes_per_token(2) // 8


def test_numbers_follow_by_hand():
    """One case, computed on paper."""
    result = sizing.size(LLAMA, H100, make_config(keep_ratio=0.5), context_tokens=8192)
    pool_bytes = (79.6 * 0.9 - 2) * 2**30 - 2 * 8_030_261_248
    assert result.num_blocks == pool_bytes // (16 * 128 * 1024)
    assert result.blocks_per_request == 512
    assert result.num_stock == result.num_blocks // 512
    assert result.num_packed == (result.num_blocks - 4) // 257  # 4096 + 16 tokens
    assert result.num_at_theta == (result.num_blocks - 4) // 343  # 257 / 0.75, rounded up


def test_eviction_has_what_the_token_layer_leaves():
    """What docs/gpu.md says of Llama-3.1-8B on an H100, and stock has all of the pool."""
    for max_num_seqs, gib in ((1024, 3.88), (128, 0.81)):
        kept = sizing.kept_beside(LLAMA, H100, Limits(131_072, max_num_seqs, 8192))
        assert round(kept / sizing.GIB, 2) == gib
        config = make_config(keep_ratio=0.5)
        whole = sizing.size(LLAMA, H100, config, context_tokens=8192)
        result = sizing.size(LLAMA, H100, config, context_tokens=8192, kept_bytes=kept)
        assert (result.num_blocks, result.num_stock) == (whole.num_blocks, whole.num_stock)
        assert whole.num_blocks_left == whole.num_blocks
        lost = kept / (16 * 128 * 1024)
        assert abs(result.num_blocks_left - (whole.num_blocks - lost)) < 1
        assert result.num_packed == (result.num_blocks_left - 4) // 257


def test_ranks_keep_the_queries_of_their_heads():
    """Rows and scores are of every rank."""
    limits = Limits(100, 1, 1000)
    one, four = (sizing.kept_beside(LLAMA, sizing.Hardware(80, tp), limits) for tp in (1, 4))
    assert one - four == 4 * 1000 * 24 * 128 * 2


@given(
    context=st.integers(64, 200_000),
    ratio=st.floats(0.01, 1),
    theta=st.floats(0, 0.95),
)
def test_answers_are_ordered(context: int, ratio: float, theta: float):
    """Holes cost requests; a request never takes more blocks than its whole context."""
    config = make_config(keep_ratio=ratio, theta_f=theta, headroom_blocks=0)
    result = sizing.size(LLAMA, H100, config, context_tokens=context)
    assert result.num_packed >= result.num_at_theta >= result.num_stock >= 1


def test_budget_bounds_long_contexts():
    """With a token budget the context no longer decides, up to the prompt that is held whole."""
    config = make_config(budget_tokens=1024)
    answers = {
        sizing.size(LLAMA, H100, config, context_tokens=context).num_packed
        for context in (8192, 32768, 131072)
    }
    assert len(answers) == 1


def test_too_small_pool_is_refused_with_numbers():
    """Weights that do not fit, or one context that does not."""
    with pytest.raises(UsageError, match="the pool has 0 blocks"):
        sizing.size(LLAMA, sizing.Hardware(16), make_config(), context_tokens=8192)
    with pytest.raises(UsageError, match="one request of 999999 tokens needs 62500"):
        sizing.size(LLAMA, H100, make_config(), context_tokens=999_999)
    with pytest.raises(UsageError, match=r"keeps 54\.00 GiB .* leaves 349 of 27997 blocks"):
        sizing.size(LLAMA, H100, make_config(), context_tokens=8192, kept_bytes=54 * sizing.GIB)


def test_unsupported_shapes_are_refused():
    """MLA, missing fields, and mixtures without the size of their weights."""
    with pytest.raises(UsageError, match="MLA"):
        sizing.model_shape({"kv_lora_rank": 512})
    with pytest.raises(UsageError, match="no 'hidden_size'"):
        sizing.model_shape({"num_attention_heads": 8})
    mixture = sizing.model_shape({**sizing.KNOWN_MODELS["llama-3.1-8b"], "num_local_experts": 8})
    with pytest.raises(UsageError, match="--weights-gib"):
        sizing.size(mixture, H100, make_config(), context_tokens=8192)
    sized = sizing.size(
        mixture, H100, make_config(), context_tokens=8192, weight_bytes=20 * sizing.GIB
    )
    assert sized.num_stock > 0


def test_command_reads_names_folders_and_files(tmp_path, capsys):
    """The three ways to name a model give one answer."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizing.KNOWN_MODELS["llama-3.1-8b"]))
    outputs = []
    for model in ("llama-3.1-8b", str(tmp_path), str(config)):
        assert sizing.main([model, "--gpu", "h100", "--keep-ratio", "0.5", "0.25"]) == 0
        outputs.append(capsys.readouterr().out.split("\n", 1)[1])
    assert len(set(outputs)) == 1
    assert outputs[0].count("| 8,192 |") == 2
    assert "Computed, not measured" in outputs[0]


def test_command_takes_the_limits_of_the_server(capsys):
    """By default vLLM's for the GPU, and the longest context."""

    def said(*flags: str) -> str:
        assert sizing.main(["llama-3.1-8b", "--gpu", "h100", *flags]) == 0
        return capsys.readouterr().out

    both = said("--context", "8192", "131072")
    assert "keeps 3.88 GiB" in both
    assert "--max-num-seqs 1024 --max-model-len 131072 --max-num-batched-tokens 8192" in both
    assert "| 8,192 | 50% | 27,997 | 54 | 26,012 | 101 | 75 |" in both
    limits = ("--max-num-seqs", "128", "--max-model-len", "131072")
    assert "keeps 0.81 GiB" in said(*limits)
    assert "keeps 0.57 GiB" in said(*limits, "--max-num-batched-tokens", "256")
    with pytest.raises(UsageError, match="--context 8192 is above --max-model-len 4096"):
        sizing.main(["llama-3.1-8b", "--gpu", "h100", "--max-model-len", "4096"])


def test_command_refuses_what_it_cannot_read(tmp_path):
    """One sentence, naming what is known."""
    with pytest.raises(UsageError, match=r"neither smollm2-135m, .* nor a config.json"):
        sizing.main(["no-such-model", "--gpu", "h100"])
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a model's configuration"):
        sizing.main([str(tmp_path), "--gpu", "h100"])
    with pytest.raises(ConfigError, match="keep_ratio"):
        sizing.main(["llama-3.1-8b", "--gpu", "h100", "--keep-ratio", "1.5"])
    with pytest.raises(SystemExit):
        sizing.main(["llama-3.1-8b", "--memory-gib", "0"])


def test_table_in_the_docs_is_what_the_code_computes():
    """docs/deploy.md cannot go stale: python -c "import service.size as s; print(...)"."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert sizing.document_table() in text
