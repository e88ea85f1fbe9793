"""A workload that does to the engine what production does, only faster."""

from __future__ import annotations

import random
from typing import Any

SHARED_PREFIX_TOKENS = 160


class Stress:
    """Keeps up to ``concurrency`` requests alive until ``num_requests`` were submitted.

    Aborts hit requests at random, and on purpose ones whose relocation is in flight. Half of the
    prompts share a prefix. The policy changes while requests run.
    """

    def __init__(
        self, arm: Any, num_requests: int, concurrency: int, seed: int, policies: list[str]
    ) -> None:
        self._arm = arm
        self._random = random.Random(seed)
        self._num_requests = num_requests
        self._concurrency = concurrency
        self._policies = policies
        self._submitted = 0
        self._alive: dict[str, int] = {}
        self._finished: list[tuple[int, int]] = []
        self._aborted = {"random": 0, "in_flight": 0}
        self._owner: dict[int, str] = {}
        self._num_blocks_passed_on = 0

    def run(self) -> dict[str, Any]:
        """Run to the end.

        Returns:
            ``finished``: pairs of wanted and delivered tokens; ``aborted`` by kind;
            ``blocks_passed_on``: blocks that one running request gave up and another one, while
            the first was still running, took.
        """
        engine = self._arm.engine
        while self._submitted < self._num_requests or engine.has_unfinished_requests():
            self._submit()
            self._abort()
            self._switch_policy()
            for output in engine.step():
                if output.finished:
                    wanted = self._alive.pop(output.request_id, None)
                    if wanted is not None:
                        self._finished.append((wanted, len(output.outputs[0].token_ids)))
            self._track_owners()
        return {
            "finished": self._finished,
            "aborted": self._aborted,
            "blocks_passed_on": self._num_blocks_passed_on,
        }

    def _submit(self) -> None:
        from vllm import SamplingParams

        draw = self._random
        while self._submitted < self._num_requests and len(self._alive) < self._concurrency:
            request = f"s{self._submitted}"
            self._submitted += 1
            start, length = draw.randint(200, 2000), draw.randint(20, 400)
            ids = self._arm.token_ids
            prompt = (ids[:SHARED_PREFIX_TOKENS] if draw.random() < 0.5 else []) + ids[
                start : start + length
            ]
            self._alive[request] = draw.randint(1, 100)
            params = SamplingParams(
                temperature=1.0,
                max_tokens=self._alive[request],
                ignore_eos=True,
                detokenize=False,
            )
            self._arm.engine.add_request(request, {"prompt_token_ids": prompt}, params)

    def _abort(self) -> None:
        in_flight = [kv.req_id for kv in self._arm.layer.requests.values() if kv.plan]
        if in_flight and self._random.random() < 0.1:
            self._abort_one(self._random.choice(in_flight).split("-")[0], "in_flight")
        elif self._alive and self._random.random() < 0.02:
            self._abort_one(self._random.choice(sorted(self._alive)), "random")

    def _abort_one(self, request: str, kind: str) -> None:
        if self._alive.pop(request, None) is not None:
            self._arm.engine.abort_request([request])
            self._aborted[kind] += 1

    def _switch_policy(self) -> None:
        if self._random.random() < 0.05:
            changes = {"policy": self._random.choice(self._policies)}
            answer = self._arm.core.vtoken_call("set_policy", {"changes": changes})
            assert "ok" in answer, answer

    def _track_owners(self) -> None:
        running = self._arm.layer.requests
        now: dict[int, str] = {}
        for kv in running.values():
            for block in kv.blocks.ids[kv.blocks.ids != 0].tolist():
                now[block] = kv.req_id
                before = self._owner.get(block)
                if before not in (None, kv.req_id) and before in running:
                    still_held = block in running[before].blocks.ids
                    self._num_blocks_passed_on += not still_held
        self._owner = {**self._owner, **now}
