"""One engine arm: a process that starts one real engine and runs workloads on it.

Run as ``python -m tests.engine.arm SPEC.json RESULT.json``. A process of its own because vLLM
keeps global state, and because a mutant must not leak into other tests. The engine runs inside
the process (no engine-core subprocess): admission then depends on nothing but the workload, so
two arms build the same batches, and the driver can look at the scheduler between steps.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[2] / "LICENSE"


def main(spec_path: str, result_path: str) -> None:
    """Start the engine of the spec, run its workloads in order, write their results."""
    spec = json.loads(Path(spec_path).read_text())
    prepare_environment(spec)
    arm = Arm(spec)
    for workload in spec["workloads"]:
        arm.results[workload["name"]] = arm.run(workload)
    Path(result_path).write_text(json.dumps(arm.results))


def prepare_environment(spec: dict[str, Any]) -> None:
    """One process, the runner of the spec, no network; before vLLM and torch are imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_PLUGINS="vtoken",
        **spec.get("environment", {}),
    )
    from tests.engine.runner_v2 import use_runner

    spec["engine"] = {**spec.get("engine", {}), **use_runner(spec)}


class Arm:
    """One engine and what the workloads need of it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        from vtoken.config import VTokenConfig
        from vtoken.integration.vllm.plugin import engine_args

        config = VTokenConfig.from_dict({"mode": "off", **spec.get("vtoken", {})})
        kwargs = {
            "model": spec["model"],
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 32,
            "block_size": 16 if config.mode != "off" else 32,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 29,
            "seed": 0,
            "disable_log_stats": True,
            **engine_args(config),
            **spec.get("engine", {}),
        }
        self.llm = LLM(**kwargs)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.layer = getattr(self.scheduler, "layer", None)
        self.token_ids = self._make_token_ids(kwargs)
        self.num_requests = 0
        self.results: dict[str, Any] = {}

    def _make_token_ids(self, kwargs: dict[str, Any]) -> list[int]:
        """A stream of tokens to cut prompts from; random where the model has no tokenizer."""
        if kwargs.get("skip_tokenizer_init"):
            return random.Random(0).choices(range(10, 1000), k=4000)
        ids: list[int] = self.llm.get_tokenizer()(TEXT.read_text())["input_ids"]
        return ids

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Run one workload to the end; see the keys read below."""
        if workload.get("stress"):
            return self._stress(workload["stress"])
        if workload.get("soak"):
            from tests.engine.soak import Soak

            return Soak(self, **workload["soak"]).run()
        if workload.get("sharing"):
            return self._sharing(workload["sharing"])
        from vllm import SamplingParams

        if workload.get("patch"):
            self._patch(workload["patch"])
        if workload.get("fault"):  # [mutant, ranks], from this workload on
            mutate = functools.partial(_mutate, *workload["fault"])
            self.core.model_executor.collective_rpc(mutate)
        signals = self._record_signals() if workload.get("record_signals") else []
        before = self._counters()
        params = SamplingParams(
            temperature=workload.get("temperature", 0.0),
            max_tokens=workload["max_tokens"],
            ignore_eos=True,
            logprobs=workload.get("logprobs"),
            detokenize=False,
        )
        if workload.get("stop_at"):  # [earlier workload, request, number of its token]
            name, request, number = workload["stop_at"]
            params.stop_token_ids = [self.results[name]["tokens"][request][number]]
        ids = []
        prompts = workload.get("prompt_tokens") or [
            self.token_ids[start : start + length] for start, length in workload["prompts"]
        ]
        options = workload.get("options", [None] * len(prompts))
        of_prompts = workload.get("prompt_logprobs", [None] * len(prompts))
        each = zip(prompts, options, of_prompts, strict=True)
        for prompt, params.extra_args, params.prompt_logprobs in each:
            ids.append(f"r{self.num_requests}")
            self.num_requests += 1
            self.engine.add_request(ids[-1], {"prompt_token_ids": prompt}, params)
        try:
            outputs, trace = self._drain(dict(workload.get("patch_steps", [])))
        except Exception as error:
            if not workload.get("may_stop"):
                raise
            return {"stopped": f"{type(error).__name__}: {error}"}
        self._settle()
        self.scheduler.__dict__.pop("_settle", None)
        classes = self._classes()
        return {
            "ids": ids,
            "tokens": [list(outputs[i].outputs[0].token_ids) for i in ids],
            "logprobs": [_logprobs(outputs[i]) for i in ids],
            "prompts": prompts,
            "trace": trace,
            "counters": _difference(self._counters(), before),
            "evictions": self._evictions(),
            "signals": signals,
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "total_blocks": self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            "finish_reasons": [outputs[i].outputs[0].finish_reason for i in ids],
            "classes": classes[0],
            "runners": [of_rank["runner"] for of_rank in classes],
            "mode": self.layer.config.mode if self.layer else "off",
            "relocation_disabled": self.layer and self.layer.control.relocation_disabled,
            "receipts": [self._receipt((o or {}).get("vtoken_receipt")) for o in options],
        }

    def _stress(self, options: dict[str, Any]) -> dict[str, Any]:
        """Random lengths, shared prefixes and aborts in every phase; see stress.py."""
        from tests.engine.stress import Stress, StressOptions

        stress = Stress(self, StressOptions(**options))
        result = self._accounted(stress.run)
        steps = stress.releases.end()
        return {**result, "num_tables": len(self.layer.requests), "release_steps": steps}

    def _sharing(self, options: dict[str, Any]) -> dict[str, Any]:
        """Half-shared prompts, with every block that others may read under audit."""
        from tests.engine.sharing import Sharing, SharingOptions

        return self._accounted(Sharing(self, SharingOptions(**options)).run)

    def _accounted(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run to the end and settle; the report with what was counted and what is free."""
        before = self._counters()
        report = run()
        self._settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            **report,
            "counters": _difference(self._counters(), before),
            "free_blocks": pool.get_num_free_blocks(),
            "total_blocks": pool.num_gpu_blocks - 1,
        }

    def _patch(self, changes: dict[str, Any]) -> None:
        answer = self.core.vtoken_call("set_policy", {"changes": changes})
        assert "ok" in answer, answer

    def _drain(self, patches: dict[int, Any]) -> tuple[dict[str, Any], list[list[float]]]:
        """Step to the end; ``patches``: step to the changes made before it."""
        outputs, trace = {}, []
        while self.engine.has_unfinished_requests():
            if len(trace) in patches:
                self._patch(patches[len(trace)])
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id.split("-")[0]] = output
            trace.append(self._trace())
        return outputs, trace

    def _trace(self) -> list[float]:
        """``[running, waiting, retained blocks, waste ratio]`` after a step."""
        counts = self.scheduler.get_request_counts()
        if self.layer is None:
            return [*counts, 0, 0]
        occupancy = self.layer.occupancy
        return [*counts, occupancy.retained_blocks, occupancy.waste_ratio]

    def _settle(self) -> None:
        """Let plans in flight settle, as the busy loop of a served engine does."""
        for _ in range(3):
            if self.scheduler.has_requests():
                self.core.step_fn()

    def _counters(self) -> dict[str, float]:
        if self.layer is None:
            return {}
        counters = self.layer.stats.snapshot()["counters"]
        flat = {"steps": float(self.scheduler.num_steps)}
        for name, rows in counters.items():
            for labels, value in rows:
                flat["/".join([name, *labels])] = value
        return flat

    def _evictions(self) -> list[Any]:
        if self.layer is None:
            return []
        log = [[i.split("-")[0], n, ids] for i, n, ids in self.scheduler.eviction_log]
        self.scheduler.eviction_log.clear()
        return log

    def _record_signals(self) -> list[Any]:
        """What the scheduler gets to see: ``[request, observed tokens, values by name]``."""
        signals: list[Any] = []
        settle = self.scheduler._settle

        def recording(report: Any) -> list[str]:
            for req_id, found in report.signals.items():
                values = {name: array.tolist() for name, array in found.values.items()}
                signals.append([req_id.split("-")[0], found.num_observed, values])
            return settle(report)

        self.scheduler._settle = recording
        return signals

    def _receipt(self, key: str | None) -> dict[str, Any] | None:
        return self.core.vtoken_call("receipt", {"key": key})["ok"] if key else None

    def _classes(self) -> list[dict[str, str]]:
        """Of each worker, with the scheduler's."""
        workers = self.core.model_executor.collective_rpc(_worker_classes)
        return [{"scheduler": _path(self.scheduler), **worker} for worker in workers]


def _worker_classes(worker: Any) -> dict[str, str]:
    """Runs in a worker, which under tensor parallelism is another process."""
    worker = getattr(worker, "worker", worker)  # within one process it comes wrapped
    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    attention = next(iter(layers)).impl
    return {"worker": _path(worker), "runner": _path(runner), "attention": _path(attention)}


def _mutate(name: str, ranks: list[int], worker: Any) -> None:
    """Runs in every worker; only those of ``ranks`` become mutants."""
    if worker.rank in ranks:
        MUTANTS[name]()


def _path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _logprobs(output: Any) -> list[list[list[float]]]:
    steps = output.outputs[0].logprobs or []
    return [sorted([token, value.logprob] for token, value in step.items()) for step in steps]


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _pools() -> Any:
    """Of CPUs and of GPUs."""
    from vtoken.kv_pool import KVPool
    from vtoken.paged_pool import PagedPool

    return KVPool, PagedPool


def _skip_every_copy() -> None:
    """The mutant that table checks cannot see: moves are committed, bytes stay behind."""
    for pool in _pools():
        pool.copy = lambda self, src_slots, dst_slots: 0


def _fail_every_third_copy() -> None:
    """A copy engine with a fault: some batches raise before anything is written."""
    import itertools

    from vtoken.kv_pool import KVPool

    calls, copy = itertools.count(1), KVPool.copy

    def flaky(self: Any, src_slots: Any, dst_slots: Any) -> int:
        if next(calls) % 3 == 0:
            raise MemoryError("injected fault")
        return copy(self, src_slots, dst_slots)

    KVPool.copy = flaky


def _mix_up_every_copy() -> None:
    """A copy engine that reports success and gives each token another one's bytes."""

    def mix_up(copy: Any) -> Any:
        return lambda self, src_slots, dst_slots: copy(self, src_slots.roll(1), dst_slots)

    for pool in _pools():
        pool.copy = mix_up(pool.copy)


def _keep_victims() -> None:
    """A rank that evicts nobody: its attention goes on reading what the others have forgotten."""
    from vtoken.integration.vllm.slot_rows import SlotRows

    SlotRows.drop_columns = lambda self, dropped: None


def _break_random_policy() -> None:
    """A policy that answers with ranks of nobody, too few and repeated ones in turn."""
    import itertools

    import numpy as np

    from vtoken.policies.random import RandomPolicy

    answers = itertools.cycle(
        [
            lambda asked: asked.num_candidates.repeat(asked.num_victims),
            lambda asked: np.arange(asked.num_victims.sum() - 1),
            lambda asked: np.zeros(asked.num_victims.sum(), np.int64),
            lambda asked: 1 / 0,
        ]
    )
    RandomPolicy.select_ranks = lambda self, asked: next(answers)(asked)


MUTANTS = {
    "no_copy": _skip_every_copy,
    "flaky_copy": _fail_every_third_copy,
    "corrupt_copy": _mix_up_every_copy,
    "keep_victims": _keep_victims,
    "broken_policy": _break_random_policy,
}


if __name__ == "__mp_main__":  # a worker: it was spawned, and imports this before vLLM
    from tests.engine.runner_v2 import prepare_worker

    prepare_worker()
if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
