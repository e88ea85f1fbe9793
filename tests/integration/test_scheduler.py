"""What the scheduler makes of requests that it cannot serve, without engine and worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsTensors

from tests.integration.schedulers import SIZE, add, make_scheduler, step, step_and_outputs
from vtoken.errors import ConfigError, VTokenError
from vtoken.history import ChangeInfo
from vtoken.integration.vllm import options
from vtoken.integration.vllm.scheduler import VTokenScheduler

BAD = {"vtoken_polcy": "h2o"}
PROMPT_LOGPROBS: list[dict[str, Any]] = [
    {"prompt_logprobs_dict": {"bad": LogprobsTensors.empty_cpu(3, 2)}},
    {"prompt_token_id_logprobs_dict": {"bad": torch.zeros(3, 2)}},
]
"""As the worker returns them with the step that ends the prompt, by two different parameters."""


def expect_error(scheduler: VTokenScheduler, **fields: Any) -> None:
    """The next step ends ``bad`` with an error and no token, and nobody else."""
    _, told = step_and_outputs(scheduler, **fields)
    assert told["bad"].finish_reason == FinishReason.ERROR
    assert told["bad"].new_token_ids == []
    assert told["good"].new_token_ids == [1]
    assert set(scheduler.requests) == set(scheduler.layer.requests) == {"good"}
    assert step(scheduler) == {"good"}


@pytest.mark.parametrize("fields", [{}, *PROMPT_LOGPROBS])
def test_invalid_options_end_their_request_alone(fields: dict[str, Any]) -> None:
    """Also with logprobs of the prompt, which vLLM takes only together with a token."""
    scheduler = make_scheduler(40)
    add(scheduler, "good", 2)
    add(scheduler, "bad", 2, extra_args=BAD, prompt_logprobs=1)
    expect_error(scheduler, **fields)


@pytest.mark.parametrize("fields", PROMPT_LOGPROBS)
def test_request_that_is_lost_as_its_prompt_ends(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for one that a relocation lost."""
    scheduler = make_scheduler(40)
    add(scheduler, "good", 2)
    add(scheduler, "bad", 2, prompt_logprobs=1)
    losses = iter([["bad"], []])
    monkeypatch.setattr(scheduler, "_settle", lambda report: next(losses))
    expect_error(scheduler, **fields)


@pytest.mark.parametrize("error", [ZeroDivisionError, VTokenError, TypeError])
def test_policy_that_cannot_be_made_ends_its_request_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of another package raises what it likes: vLLM would end the engine."""

    def make(*args: Any) -> None:
        raise error("of another package")

    monkeypatch.setattr(options, "policy_for", make)
    scheduler = make_scheduler(40)
    add(scheduler, "good", 2)
    add(scheduler, "bad", 2, extra_args={"vtoken_policy": "theirs"})
    expect_error(scheduler)


def test_input_that_comes_in_parts_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the next part arrives before or after the error, or none does."""
    scheduler = make_scheduler(40)
    add(scheduler, "good", 2)
    add(scheduler, "bad", 2, resumable=True)
    add(scheduler, "bad", 1, resumable=True)
    expect_error(scheduler)
    assert "several parts" in caplog.text
    add(scheduler, "bad", 1, resumable=True)
    expect_error(scheduler)


WITHIN_PROMPTS = {"policy": "streaming_llm", "budget_tokens": 64, "evict_during_prefill": True}
UNCUT = {"enable_chunked_prefill": False}


def test_prompt_that_is_cut_into_chunks_takes_half_of_what_is_free() -> None:
    """The step is limited, and the prompt runs all the same."""
    scheduler = make_scheduler(40, **WITHIN_PROMPTS)
    add(scheduler, "only", 30)
    output = scheduler.schedule()
    assert 0 < output.num_scheduled_tokens["only"] < 30 * SIZE


def test_prompts_are_not_cut_for_requests_that_have_ended() -> None:
    """They kept a document under which all prompts are; with the last of them it goes."""
    scheduler = make_scheduler(40, **WITHIN_PROMPTS)
    add(scheduler, "old", 2, max_tokens=2)
    step(scheduler)
    scheduler.layer.control.patch({"evict_during_prefill": False}, ChangeInfo(apply_to="new"))
    while scheduler.requests:
        step(scheduler)
    add(scheduler, "new", 30)
    assert scheduler.schedule().num_scheduled_tokens["new"] == 30 * SIZE


def test_prompts_that_are_not_cut_do_not_wait_for_ever() -> None:
    """What would limit their steps is refused, at start and later, and changes nothing."""
    with pytest.raises(ConfigError, match="evict_during_prefill=True"):
        make_scheduler(40, engine=UNCUT, **WITHIN_PROMPTS)
    scheduler = make_scheduler(40, engine=UNCUT, policy="streaming_llm", budget_tokens=64)
    control = scheduler.layer.control
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        control.patch({"evict_during_prefill": True})
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        control.preview(scheduler.layer.config.patched({"evict_during_prefill": True}))
    control.patch({"budget_tokens": 128})
    add(scheduler, "only", 30)
    assert step(scheduler) == {"only"}


def test_preempted_request_is_counted_when_it_ends() -> None:
    """Not before: it comes back, holds blocks again, and may lose tokens again."""
    scheduler = make_scheduler(16, headroom_blocks=0)
    stats = scheduler.layer.stats
    add(scheduler, "first", 7, max_tokens=60)
    add(scheduler, "second", 6, max_tokens=60)

    def num_observed() -> set[int]:
        histograms = stats.snapshot()["histograms"]
        names = ("request_retained_blocks", "request_evicted_tokens")
        return {sum(histograms[name]["counts"]) for name in names}

    for _ in range(59):
        step(scheduler)
    assert stats.counter("preemptions_total") == 1
    assert num_observed() == {0}
    for _ in range(60):
        step(scheduler)
    assert not scheduler.requests
    assert num_observed() == {2}
