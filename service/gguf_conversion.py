"""Turns the SmolLM2-135M-Instruct GGUF file into a Hugging Face model folder.

Runs as its own process (``python -m service.gguf_conversion GGUF FOLDER``), started by
`service.embedded_model` before the engine exists: PyTorch's thread pools would otherwise be alive
in the server process when it forks, and their memory would stay with it.  Standard output carries
one progress sentence per line; the exit status says how it ended.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXIT_DISK_FULL = 3
MAX_CONTEXT_TOKENS = 8192
TIED_WEIGHT = "lm_head.weight"
BOS_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
UNK_TOKEN = "<|endoftext|>"


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template of `gguf` into the empty `folder`.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the GGUF file is not the model this module knows.
    """
    _say("reading the tokenizer")
    tokenizer = _load_tokenizer(gguf)
    _save_tokenizer(tokenizer, folder)
    _say("unpacking 135 million weights")
    model = _load_model(gguf, tokenizer)
    _say("writing the weights as bfloat16")
    _save_model(model, folder)


def main(arguments: list[str]) -> int:
    """Convert ``arguments = [gguf, folder]``; return the process's exit status."""
    gguf, folder = arguments
    try:
        convert_gguf(Path(gguf), Path(folder))
    except Exception as error:
        if _is_disk_full(error):
            return EXIT_DISK_FULL
        raise
    return 0


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the splitting rule that GGUF names (``smollm``) but cannot hold."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.bos_token = BOS_TOKEN
    tokenizer.eos_token = EOS_TOKEN
    tokenizer.pad_token = EOS_TOKEN
    tokenizer.unk_token = UNK_TOKEN
    tokenizer.model_max_length = MAX_CONTEXT_TOKENS
    if not tokenizer.chat_template:
        raise ValueError(f"expected a chat template in {gguf}, found none")
    return tokenizer


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save it under the class name that every transformers release can load."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _load_model(gguf: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the dense model, its configuration cleaned of every trace of the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.max_position_embeddings = MAX_CONTEXT_TOKENS
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF stores it as float32
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
        setattr(model.generation_config, name, getattr(tokenizer, name))
    return model


def _save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save config, generation config and the bf16 weights, without the tied output matrix."""
    import torch
    from safetensors.torch import save_file

    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != TIED_WEIGHT
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def _is_disk_full(error: Exception) -> bool:
    """Tell whether `error` means no space; safetensors reports that in words only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    words = str(error)
    return f"os error {errno.ENOSPC}" in words or f"os error {errno.EDQUOT}" in words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
