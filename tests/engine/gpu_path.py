"""An engine on the GPU path, without a GPU: everything but the device is what a GPU would run.

Model Runner V2, vLLM's Triton attention on pages of one token, live tables, the relocation and
score kernels and the CUDA copy engine, all under Triton's interpreter; streams are recorded and
do their work at once. Run as ``python -m tests.engine.gpu_path SPEC.json RESULT.json``, with the
specification of :mod:`tests.engine.arm`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tests.engine.arm import Arm, prepare_environment

BACKEND = "vtoken.integration.vllm.attention_gpu_triton.LiveTritonBackend"


def main(spec_path: str, result_path: str) -> None:
    """As :func:`tests.engine.arm.main`, with another runner."""
    spec = json.loads(Path(spec_path).read_text())
    prepare_environment({**spec, "runner": "v2"})
    device = use_gpu_path()
    arm = Arm(spec)
    results = {}
    for workload in spec["workloads"]:
        device.forgetful = workload.get("forgetful", False)
        del device.streams.log[:]
        result = results[workload["name"]] = arm.run(workload)
        result["stream_log"] = [entry[:2] for entry in device.streams.log]
    Path(result_path).write_text(json.dumps(results))


class Device:
    """What stands in for the GPU.

    Attributes:
        streams: recorded.
        forgetful: a mutant: relocations copy nothing.
    """

    def __init__(self) -> None:
        self.streams = _fake_streams()
        self.forgetful = False

    def move(self, family: Any, src: Any, dst: Any) -> None:
        """The relocation kernel."""
        from vtoken.copy_engine.triton_kernels import move_by_kernel

        self.streams.log.append(("copy", self.streams.current.name))
        if not self.forgetful:
            move_by_kernel(family, src, dst)

    def score(self, *args: Any) -> Any:
        """The score kernel."""
        from vtoken.gpu_scores.triton_kernels import mass_by_kernel

        self.streams.log.append(("score", self.streams.current.name))
        return mass_by_kernel(*args)


def use_gpu_path() -> Device:
    """Let the worker build the runner below."""
    import torch

    from vtoken.integration.vllm import model_runner_v2
    from vtoken.integration.vllm.attention_metadata import LiveRows
    from vtoken.integration.vllm.compat.layers import attention_override
    from vtoken.integration.vllm.device_rows import DeviceSlotRows, upload
    from vtoken.integration.vllm.gpu_core import GpuTools, TokenPages, make_gpu_core
    from vtoken.integration.vllm.observer import default_layers
    from vtoken.integration.vllm.query_capture import QueryCapture

    # vLLM's cache write picks its tile by the GPU's generation.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    device = Device()
    tools = GpuTools(device.streams, device.move, device.score)
    base = model_runner_v2.VTokenCPUModelRunnerV2

    class GpuPathRunner(base):
        def load_model(self, *args: Any, **kwargs: Any) -> None:
            # Past our CPU runner, whose own override would win.
            with attention_override("CPU_ATTN", BACKEND):
                super(model_runner_v2.TokenLayerRunner, self).load_model(*args, **kwargs)

        def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            super(base, self).initialize_kv_cache(kv_cache_config, *args, **kwargs)
            caches = self.layer_caches(kv_cache_config)
            block_size = self.cache_config.block_size
            rows = DeviceSlotRows(
                self.max_num_reqs, self.max_model_len, TokenPages(block_size), self.device
            )
            layers = self.compilation_config.static_forward_context
            names = list(caches)
            impl = layers[names[0]].impl
            capture = QueryCapture(
                [names[i] for i in default_layers(len(names))],
                (self.max_num_tokens, impl.num_heads, impl.head_size),
                self.dtype,
                self.device,
            )
            groups = [group for of_cache in self.attn_groups for group in of_cache]
            self._core, _ = make_gpu_core(rows, caches, layers, groups, capture, tools)

        def inputs_prepared(self, req_ids: Any, num_new: Any, write_slots: Any) -> None:
            rows, lens = self.core.append(req_ids, num_new, write_slots)
            numbers, host = torch.from_numpy(rows), torch.from_numpy(lens)
            live = LiveRows(
                self.core.rows.table, upload(numbers, self.device), upload(host, self.device)
            )
            for builder in self.metadata_builders():
                builder.set_live_rows(live, lens_cpu=host)

    model_runner_v2.VTokenCPUModelRunnerV2 = GpuPathRunner
    return device


def _fake_streams() -> Any:
    path = Path(__file__).parents[1] / "copy_engine" / "fake_streams.py"
    spec = importlib.util.spec_from_file_location("fake_streams", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeStreams()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
