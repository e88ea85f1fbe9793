"""Half-shared prompts in one engine arm, with an audit of every block that others may read.

``num_requests`` requests form groups of ``degree``; a group shares the first half of its prompts.
The same prompts are sent a second time after the first wave, to see what the prefix cache kept.
The workload begins with an empty prefix cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SharingOptions:
    """One workload; lengths in tokens.

    Attributes:
        room_tokens: of the pool, what the requests get; None: all. The rest is held by nobody's
            blocks, so that pools of many sizes are one engine's.
        patch: changes of the policy document for this workload; ignored by stock vLLM.
    """

    degree: int
    seed: int = 0
    num_requests: int = 8
    shared_tokens: int = 256
    private_tokens: int = 256
    max_tokens: int = 48
    room_tokens: int | None = None
    patch: dict[str, Any] = field(default_factory=dict)


class Sharing:
    """Runs one workload on an arm and reports what it saw."""

    def __init__(self, arm: Any, options: SharingOptions) -> None:
        self._arm = arm
        self._options = options
        self._pool = arm.scheduler.kv_cache_manager.block_pool
        self._audit = CacheAudit(arm) if arm.layer is not None else None

    def run(self) -> dict[str, Any]:
        """Two waves of the same prompts.

        Returns:
            ``waves``: per wave tokens, prefix hit tokens per request, and blocks in use after
            each step in which all requests ran; ``num_digests``: cached blocks compared;
            ``changed``: those whose bytes changed; ``source_references``: references of each
            source block when its plan was made.
        """
        assert self._pool.reset_prefix_cache()
        before = {}
        if self._arm.layer is not None and self._options.patch:
            before = {name: self._arm.layer.config.to_dict()[name] for name in self._options.patch}
            self._arm._patch(self._options.patch)
        ballast = self._pool.get_new_blocks(self._num_ballast_blocks())
        with PlanWatch(self._arm) as watch:
            waves = [self._wave(name) for name in ("first", "again")]
        self._arm._settle()
        self._pool.free_blocks(ballast)
        if before:
            self._arm._patch(before)
        return {
            "waves": waves,
            "num_digests": self._audit.num_digests if self._audit else 0,
            "changed": self._audit.changed if self._audit else [],
            "source_references": watch.source_references,
        }

    def _num_ballast_blocks(self) -> int:
        if self._options.room_tokens is None:
            return 0
        manager = self._arm.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        num_blocks: int = self._pool.num_gpu_blocks - 1
        return num_blocks - self._options.room_tokens // manager.block_size

    def _wave(self, name: str) -> dict[str, Any]:
        from vllm import SamplingParams

        engine, degree = self._arm.engine, self._options.degree
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._options.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        ids = []
        for i, prompt in enumerate(make_half_shared_prompts(self._options)):
            ids.append(f"{name}{degree}x{i}")
            engine.add_request(ids[-1], {"prompt_token_ids": prompt}, params)
        outputs: dict[str, Any] = {}
        blocks: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id.split("-")[0]] = output
            if self._audit is not None:
                self._audit.check()
            if self._arm.scheduler.get_request_counts()[0] == len(ids):
                blocks.append(self._blocks_in_use())
        return {
            "tokens": [list(outputs[i].outputs[0].token_ids) for i in ids],
            "hit_tokens": [outputs[i].num_cached_tokens or 0 for i in ids],
            "blocks": blocks,
        }

    def _blocks_in_use(self) -> int:
        return self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()


class CacheAudit:
    """Remembers the K/V bytes under every prefix-cache hash; they may never change.

    A block leaves the audit when vLLM takes it out of the prefix cache, which it does before the
    block is given to anybody for writing; it may come back with the same hash, computed anew. A
    reset of the cache takes them all out.
    """

    def __init__(self, arm: Any) -> None:
        import torch  # not before the engine has set the number of threads

        self._arange = torch.arange
        worker = arm.core.model_executor.driver_worker.worker
        self._kv = worker.model_runner.core._pool
        self._blocks = arm.scheduler.kv_cache_manager.block_pool.blocks
        self._size = arm.scheduler.layer._pool.block_size
        self._known: dict[int, tuple[Any, str]] = {}
        self._pool = pool = arm.scheduler.kv_cache_manager.block_pool
        evict, reset = pool._maybe_evict_cached_block, pool.reset_prefix_cache

        def watched(block: Any) -> bool:
            self._known.pop(block.block_id, None)
            evicted: bool = evict(block)
            return evicted

        def watched_reset() -> bool:
            done: bool = reset()
            if done:
                self._known.clear()
            return done

        pool._maybe_evict_cached_block = watched
        pool.reset_prefix_cache = watched_reset
        self.num_digests = 0
        self.changed: list[int] = []

    def check(self) -> None:
        """Hash every cached block; call between steps, when what was scheduled is computed."""
        cached = {b.block_id: b.block_hash for b in self._blocks if b.block_hash is not None}
        assert self._pool.cached_block_hashes_by_block.keys() <= cached.keys()
        for block, block_hash in cached.items():
            first = block * self._size
            digest = self._kv.digest(self._arange(first, first + self._size))
            before = self._known.get(block)
            self.num_digests += 1
            if before is not None and before != (block_hash, digest):
                self.changed.append(block)
            self._known[block] = (block_hash, digest)
        assert self._known.keys() <= cached.keys(), "left the cache unseen"


class PlanWatch:
    """While active, notes how many references each source block has when it is planned."""

    def __init__(self, arm: Any) -> None:
        self._blocks = arm.scheduler.kv_cache_manager.block_pool.blocks
        self._reservations = None if arm.layer is None else arm.layer.reclamation.reservations
        self.source_references: list[int] = []

    def __enter__(self) -> PlanWatch:
        if self._reservations is not None:
            reserve = self._reservations._reserve

            def watched(kv: Any, choice: Any, *others: Any) -> Any:
                sources = kv.blocks.ids[choice.indices].tolist()
                self.source_references += [self._blocks[block].ref_cnt for block in sources]
                return reserve(kv, choice, *others)

            self._reservations._reserve = watched
        return self

    def __exit__(self, *_: object) -> None:
        if self._reservations is not None:
            del self._reservations._reserve


def make_half_shared_prompts(options: SharingOptions) -> list[list[int]]:
    """``[num_requests]`` prompts; each group of ``degree`` neighbours has the same first half."""
    draw = random.Random(1000 * options.seed + options.degree)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(10, 1000) for _ in range(n)]

    prompts = []
    for i in range(options.num_requests):
        if i % options.degree == 0:
            shared = tokens(options.shared_tokens)
        prompts.append(shared + tokens(options.private_tokens))
    return prompts
