"""Reports of several ranks become one, and scores the mean over all heads."""

from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.integration.vllm import ranks as module
from vtoken.integration.vllm.messages import SignalReport, StepReport, VerifyResult
from vtoken.integration.vllm.ranks import OneRank, TensorParallelRanks, merged
from vtoken.types import CopyResult


def copied(ticket=1, error=None, seconds=0.0, stall=0.0, num_bytes=8):
    return CopyResult(ticket, error, seconds, stall, num_bytes)


class Neighbour:
    """vLLM's coordinator of a group of two whose other rank always sends ``tensor``."""

    world_size = 2
    cpu_group = "gloo"

    def __init__(self, tensor):
        self.tensor, self.num_calls = tensor, 0

    def all_reduce(self, tensor):
        self.num_calls += 1
        return tensor + self.tensor


def test_a_batch_is_as_slow_as_its_slowest_rank():
    """And its bytes are those of all ranks."""
    reports = [StepReport((copied(1, None, *times),)) for times in ((1.0, 0.5), (2.0, 0.1))]
    (copy,) = merged(reports).copies
    assert astuple(copy) == (1, None, 2.0, 0.5, 16)


def test_a_batch_failed_if_one_rank_failed():
    """The error names the rank; the other batch of the step stands."""
    reports = [
        StepReport((copied(1), copied(2))),
        StepReport((copied(1), copied(2, "out of memory"))),
        StepReport((copied(1), copied(2))),
    ]
    first, second = merged(reports).copies
    assert first.error is None
    assert second.error == "rank 1: out of memory"


def test_ranks_that_disagree_about_batches_are_a_bug():
    """Every rank is sent the same batches and joins them in the same steps."""
    with pytest.raises(AssertionError, match=r"\[1, 2\]"):
        merged([StepReport((copied(1),)), StepReport((copied(2),))])
    with pytest.raises(ValueError, match=r"longer|shorter"):
        merged([StepReport((copied(1),)), StepReport()])


def test_digests_of_all_ranks_are_compared():
    """Each rank hashes its own heads; one damaged rank is enough to notice."""
    good, bad = VerifyResult(1, "a", 3, "x", "x"), VerifyResult(1, "a", 3, "y", "z")
    assert merged([StepReport(verified=(good,)), StepReport(verified=(bad,))]).verified == (
        good,
        bad,
    )


def test_a_row_that_differs_on_one_rank_is_the_one_reported():
    """So that the scheduler finds it: it compares reported rows with its table."""
    right, wrong = np.array([4, 5], np.int32), np.array([4, 9], np.int32)
    reports = [StepReport(rows={"a": right, "b": right}) for _ in range(3)]
    reports[1] = StepReport(rows={"a": right, "b": wrong})
    rows = merged(reports).rows
    assert rows["a"] is right
    assert rows["b"] is wrong


def test_signals_are_those_of_the_first_rank():
    """They are equal on all ranks."""
    signals = {"a": SignalReport(2, {})}
    report = merged([StepReport(signals=signals, worker_seconds=1.0), StepReport()])
    assert report.signals is signals
    assert report.worker_seconds == 1.0


def test_one_rank_is_left_alone():
    """No rank in the error, nothing copied."""
    report = StepReport((copied(1, "out of memory"),))
    assert merged(OneRank().gather(report)) is report
    parts = [torch.ones(2)]
    assert OneRank().mean(parts)[0] is parts[0]


def test_mean_of_all_parts_takes_one_all_reduce():
    """Shapes come back as they were."""
    group = Neighbour(torch.tensor([2.0, 4.0, 6.0, 8.0, 0.0]))
    a, b = TensorParallelRanks(group).mean([torch.zeros(2, 2), torch.ones(1)])
    assert a.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert b.tolist() == [0.5]
    assert group.num_calls == 1


def test_mean_of_nothing_communicates_nothing():
    """A step in which nobody observes."""
    group = Neighbour(torch.zeros(0))
    assert TensorParallelRanks(group).mean([]) == []
    assert group.num_calls == 0


def test_gather_goes_through_the_cpu_group(monkeypatch):
    """Reports are Python objects, and on GPUs the main group carries tensors only."""
    other = StepReport(worker_seconds=2.0)

    def all_gather_object(into, mine, group):
        assert group == "gloo"
        into[:] = [mine, other]

    fake = SimpleNamespace(all_gather_object=all_gather_object)
    monkeypatch.setattr(module.torch, "distributed", fake)
    mine = StepReport()
    assert TensorParallelRanks(Neighbour(None)).gather(mine) == [mine, other]
