"""The tiny model with a tokenizer: a service for load tests whose steps cost milliseconds.

    python -m tests.loadtest.model FOLDER
    scripts/loadtest frontier --model FOLDER

What it says means nothing. Block counts under policy ``random`` do not depend on what a model says.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.engine.tiny_model import VOCABULARY, ensure_tiny_model


def make_model(folder: Path) -> Path:
    """The tiny model with a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(ensure_tiny_model(), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>"]
    rest = [f"<{n}>" for n in range(VOCABULARY - len(alphabet) - len(special))]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet, *rest])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
