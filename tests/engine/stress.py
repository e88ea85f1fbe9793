"""A workload that does to the engine what production does, only faster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine.releases import Releases


@dataclass(frozen=True)
class StressOptions:
    """How much of what.

    Attributes:
        num_requests: submitted in all, unless ``max_seconds`` come first.
        concurrency: requests alive at once.
        seed: of everything that is drawn.
        changes: live changes of the policy document, one of which is made now and then.
        prompt_tokens: shortest and longest private part of a prompt.
        output_tokens: fewest and most tokens to generate.
        shared_tokens: length of the prefix that half of the prompts share.
        num_families: how many such prefixes there are.
        max_seconds: no request is submitted later than this; 0: no limit.
        preempt_ratio: share of steps before which the newest running request is preempted.
        reset_ratio: share of steps before which, if a relocation is in flight, the prefix cache is
            reset with everything that runs.
        tracks_owners: follow each block from request to request; costs time in every step.
    """

    num_requests: int
    concurrency: int
    seed: int
    changes: Sequence[dict[str, Any]]
    prompt_tokens: tuple[int, int] = (20, 400)
    output_tokens: tuple[int, int] = (1, 100)
    shared_tokens: int = 160
    num_families: int = 1
    max_seconds: float = 0.0
    preempt_ratio: float = 0.0
    reset_ratio: float = 0.0
    tracks_owners: bool = True


class Stress:
    """Keeps up to ``concurrency`` requests alive until ``num_requests`` were submitted.

    Aborts hit requests at random, and on purpose ones whose relocation is in flight. Half of the
    prompts share a prefix. The policy changes while requests run.
    """

    def __init__(
        self, arm: Any, options: StressOptions, after_step: Callable[[], None] | None = None
    ) -> None:
        """``after_step`` is called after every engine step."""
        self._arm = arm
        self._options = options
        self._after_step = after_step
        self._random = random.Random(options.seed)
        self._alive: dict[str, int] = {}
        self._owner: dict[int, str] = {}
        self._num_blocks_passed_on = 0
        self.submitted = 0
        self.finished: list[tuple[int, int]] = []
        self.aborted = {"random": 0, "in_flight": 0}
        self.releases = Releases(arm)
        self._aborts_planned = False
        self._schedule = arm.scheduler.schedule
        arm.scheduler.schedule = self._scheduling
        self.num_changes = 0
        self.num_resets = 0

    def run(self) -> dict[str, Any]:
        """Run to the end.

        Returns:
            ``finished``: pairs of wanted and delivered tokens; ``aborted`` by kind;
            ``blocks_passed_on``: blocks that one running request gave up and another one, while
            the first was still running, took.
        """
        engine, start = self._arm.engine, time.monotonic()
        while self._goes_on(start) or engine.has_unfinished_requests():
            if self._goes_on(start):
                self._submit()
            self._abort()
            self._preempt()
            self._reset()
            self._change_policy()
            self.releases.step_begins()
            for output in engine.step():
                if output.finished:
                    wanted = self._alive.pop(output.request_id, None)
                    if wanted is not None:
                        self.finished.append((wanted, len(output.outputs[0].token_ids)))
            if self._options.tracks_owners:
                self._track_owners()
            if self._after_step is not None:
                self._after_step()
        return {
            "submitted": self.submitted,
            "finished": self.finished,
            "aborted": self.aborted,
            "changes": self.num_changes,
            "resets": self.num_resets,
            "blocks_passed_on": self._num_blocks_passed_on,
        }

    def _goes_on(self, start: float) -> bool:
        limit = self._options.max_seconds
        in_time = not limit or time.monotonic() - start < limit
        return in_time and self.submitted < self._options.num_requests

    def _preempt(self) -> None:
        """What vLLM does when no block is left, which reclamation has made rare."""
        scheduler, ratio = self._arm.scheduler, self._options.preempt_ratio
        if ratio and len(scheduler.running) > 1 and self._random.random() < ratio:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            scheduler.prev_step_scheduled_req_ids.clear()

    def _reset(self) -> None:
        """What ``POST /reset_prefix_cache?reset_running_requests=true`` does."""
        ratio, in_flight = self._options.reset_ratio, self._arm.layer.reclamation.num_in_flight
        # The first chance is taken, so that a short run has one, too.
        if ratio and in_flight and (not self.num_resets or self._random.random() < ratio):
            assert self._arm.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.num_resets += 1

    def _submit(self) -> None:
        from vllm import SamplingParams

        draw, options = self._random, self._options
        while self.submitted < options.num_requests and len(self._alive) < options.concurrency:
            request = f"s{self.submitted}"
            self.submitted += 1
            prompt = self._prompt()
            self._alive[request] = draw.randint(*options.output_tokens)
            params = SamplingParams(
                temperature=1.0,
                max_tokens=self._alive[request],
                ignore_eos=True,
                detokenize=False,
            )
            self._arm.engine.add_request(request, {"prompt_token_ids": prompt}, params)

    def _prompt(self) -> list[int]:
        draw, options, ids = self._random, self._options, self._arm.token_ids
        start, length = draw.randint(200, 2000), draw.randint(*options.prompt_tokens)
        family = draw.randrange(options.num_families) if options.num_families > 1 else 0
        shared = ids[family : family + options.shared_tokens] if draw.random() < 0.5 else []
        prompt: list[int] = shared + ids[start : start + length]
        return prompt

    def _abort(self) -> None:
        in_flight = [kv.req_id for kv in self._arm.layer.requests.values() if kv.plan]
        if in_flight and self._random.random() < 0.1:
            victim = self._random.choice(in_flight).split("-")[0]
            if self.aborted["in_flight"] % 2:
                self._aborts_planned = True
            else:
                self._abort_one(victim, "in_flight")
        elif self._alive and self._random.random() < 0.02:
            self._abort_one(self._random.choice(sorted(self._alive)), "random")

    def _abort_one(self, request: str, kind: str) -> None:
        if self._alive.pop(request, None) is not None:
            self.releases.abort_arrives(request)
            self._arm.engine.abort_request([request])
            self.aborted[kind] += 1

    def _scheduling(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule; now and then a request whose copies this step sends is aborted meanwhile."""
        output = self._schedule(*args, **kwargs)
        batch = output.vtoken.relocation if self._aborts_planned else None
        request = batch.req_ids[0].split("-")[0] if batch is not None else None
        if self._alive.pop(request, None) is not None:
            self._aborts_planned = False
            self.releases.abort_arrives(request)
            ids = self._arm.engine.output_processor.abort_requests([request], internal=False)
            self._arm.core.aborts_queue.put_nowait(ids)  # as the thread that reads the socket
            self.aborted["in_flight"] += 1
        return output

    def _change_policy(self) -> None:
        if self._random.random() < 0.05:
            changes = self._random.choice(self._options.changes)
            answer = self._arm.core.vtoken_call("set_policy", {"changes": changes})
            assert "ok" in answer, answer
            self.num_changes += 1

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
