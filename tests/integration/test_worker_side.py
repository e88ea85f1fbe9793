"""The adapters over vLLM's private worker names: nothing of ours stays behind after they end."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu import model_runner as model_runner_v2
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_cpu import LiveCPUAttentionBackend
from vtoken.integration.vllm.compat import check_vllm_version
from vtoken.integration.vllm.compat.layers import attention_override
from vtoken.integration.vllm.compat.runner_v2 import cpu_runner_class_v2
from vtoken.integration.vllm.compat.worker_side import HookedCPUModelRunner, cpu_runner_class
from vtoken.integration.vllm.cpu_core import BACKEND
from vtoken.integration.vllm.messages import ATTRIBUTE, StepReport
from vtoken.integration.vllm.model_runner import VTokenCPUModelRunner

CPU_ATTN = AttentionBackendEnum.CPU_ATTN


def test_override_ends_with_the_block():
    """Inside the block layers get our backend, afterwards vLLM's own again."""
    stock = CPU_ATTN.get_class()
    with attention_override(*BACKEND):
        assert CPU_ATTN.get_class() is LiveCPUAttentionBackend
    assert CPU_ATTN.get_class() is stock
    assert not CPU_ATTN.is_overridden()


def test_override_ends_when_loading_fails():
    """A model that cannot be loaded leaves the process as it was."""
    with (
        pytest.raises(RuntimeError, match="no weights"),
        attention_override(*BACKEND),
    ):
        raise RuntimeError("no weights")
    assert not CPU_ATTN.is_overridden()


def test_override_gives_another_plugins_override_back():
    """If someone else replaced the backend, theirs returns."""
    theirs = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    with attention_override("CPU_ATTN", theirs):
        with attention_override(*BACKEND):
            pass
        assert CPU_ATTN.get_path() == theirs


def test_override_empties_the_selector_cache_on_both_sides():
    """A class chosen under one rule must not be handed to a model under the other."""
    cached = selector._cached_get_attn_backend
    config = selector.AttentionSelectorConfig(64, torch.bfloat16, "auto", 16)
    stock = cached(None, config)
    with attention_override(*BACKEND):
        assert cached(None, config) is LiveCPUAttentionBackend
    assert cached(None, config) is stock


def test_runner_class_is_replaced_for_the_call_only():
    """The worker module names vLLM's runner again afterwards."""
    with cpu_runner_class(VTokenCPUModelRunner):
        assert cpu_worker.CPUModelRunner is VTokenCPUModelRunner
    assert cpu_worker.CPUModelRunner is CPUModelRunner


def make_sampling_runner():
    """A runner of two seeded requests; the second has not finished its prefill."""
    runner = object.__new__(HookedCPUModelRunner)
    generators = {i: torch.Generator().manual_seed(5) for i in range(2)}
    runner.input_batch = SimpleNamespace(generators=generators, num_reqs=2)
    runner.discard_request_mask = SimpleNamespace(np=np.array([False, True, True]))
    return runner, generators


def draw(generators):
    return {i: torch.rand(1, generator=g).item() for i, g in generators.items()}


def test_sampling_rewinds_seeded_requests_that_are_still_prefilling(monkeypatch):
    """Chunks of a prefill draw nothing: the first real token gets the first random number."""
    runner, generators = make_sampling_runner()
    monkeypatch.setattr(CPUModelRunner, "_sample", lambda *_: draw(generators))
    first = runner._sample(None, None)
    second = runner._sample(None, None)
    assert first[1] == second[1]
    assert first[0] != second[0]


def test_bookkeeping_never_rewinds_a_cpu_generator(monkeypatch):
    """vLLM's own rewinding raises on CPU, so it must not see such generators, even if it fails."""
    runner, generators = make_sampling_runner()
    seen = []

    def bookkeeping(self):
        seen.append(sorted(self.input_batch.generators))
        raise RuntimeError("late")

    monkeypatch.setattr(CPUModelRunner, "_bookkeeping_sync", bookkeeping)
    with pytest.raises(RuntimeError, match="late"):
        runner._bookkeeping_sync()
    assert seen == [[0]]
    assert sorted(generators) == [0, 1]


def test_shared_empty_output_is_never_tagged():
    """vLLM returns one object for all empty steps of all engines of the process."""
    runner = object.__new__(VTokenCPUModelRunner)
    runner._core = SimpleNamespace(report=lambda: StepReport(worker_seconds=1.0))
    output = runner.with_report(EMPTY_MODEL_RUNNER_OUTPUT)
    assert getattr(output, ATTRIBUTE).worker_seconds == 1.0
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, ATTRIBUTE)


def test_report_of_a_wrapped_output_rides_on_what_is_wrapped():
    """V2 returns the output before its tensors have arrived; the scheduler gets the inner one."""
    runner = object.__new__(VTokenCPUModelRunner)
    runner._core = SimpleNamespace(report=lambda: StepReport(worker_seconds=1.0))
    inner = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
    outer = SimpleNamespace(model_runner_output=inner)
    assert runner.with_report(outer) is outer
    assert getattr(inner, ATTRIBUTE).worker_seconds == 1.0


def test_steps_that_no_scheduler_made_start_with_empty_rows():
    """vLLM's warm-up sends requests of its own, without a message."""
    messages = []
    runner = object.__new__(VTokenCPUModelRunner)
    runner._core = SimpleNamespace(begin_step=lambda message, join_now: messages.append(message))
    new = [SimpleNamespace(req_id="warm-up")]
    output = SimpleNamespace(scheduled_new_reqs=new, total_num_scheduled_tokens=1)
    runner.step_begins(output, touches_blocks=False)
    assert [len(row) for row in messages[0].rows.values()] == [0]
    assert list(messages[0].rows) == ["warm-up"]


def test_runner_of_the_newer_generation_is_replaced_for_the_call_only():
    """The worker imports it by this name while it sets itself up."""
    stock = model_runner_v2.CPUModelRunner
    with cpu_runner_class_v2(VTokenCPUModelRunner):
        assert model_runner_v2.CPUModelRunner is VTokenCPUModelRunner
    assert model_runner_v2.CPUModelRunner is stock


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7"])
def test_supported_versions_pass(version):
    """Any patch release of the pinned minor version."""
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.3"])
def test_other_versions_are_refused_with_both_numbers(version):
    """The message names what is supported and what was found."""
    with pytest.raises(UnsupportedError, match=rf"0\.32\.x, found {version}"):
        check_vllm_version(version)
