"""An engine arm whose odd requests use a LoRA adapter: ``python -m tests.engine.lora SPEC RESULT``.

The specification is :mod:`tests.engine.arm`'s, with the adapter's folder as ``lora``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engine.arm import Arm, prepare_environment

RANK, ALPHA = 4, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def main(spec_path: str, result_path: str) -> None:
    """As :func:`tests.engine.arm.main`."""
    spec = json.loads(Path(spec_path).read_text())
    prepare_environment(spec)
    arm = Arm(spec)
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("other", 1, spec["lora"])
    add_request = arm.engine.add_request

    def add(req_id: str, *args: Any, **kwargs: Any) -> Any:
        odd = int(req_id[1:]) % 2 == 1
        return add_request(req_id, *args, lora_request=adapter if odd else None, **kwargs)

    arm.engine.add_request = add
    results = {workload["name"]: arm.run(workload) for workload in spec["workloads"]}
    Path(result_path).write_text(json.dumps(results))


def make_adapter(model_path: str, adapter_path: Path, merged_path: Path) -> None:
    """Write a random adapter of the attention, and the model with it merged in."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        for name in PROJECTIONS:
            weight = getattr(layer.self_attn, name).weight
            down = 0.2 * torch.randn(RANK, weight.shape[1], generator=generator)
            up = 0.2 * torch.randn(weight.shape[0], RANK, generator=generator)
            key = f"base_model.model.model.layers.{number}.self_attn.{name}"
            weights |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
            weight.data += ALPHA / RANK * up @ down
    adapter_path.mkdir()
    save_file(weights, adapter_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (adapter_path / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
