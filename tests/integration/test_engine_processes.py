"""vLLM's functions for processes of an engine, with one of ours before them."""

import pickle

import pytest
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

from vtoken.integration.vllm.compat.engine_processes import engine_processes_begin_with

CALLS = []


def first():
    CALLS.append("first")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(EngineCoreProc, "run_engine_core"), (DPCoordinatorProc, "run_coordinator")],
)
def test_process_begins_with_ours_and_goes_on_as_vllms(owner, name, monkeypatch):
    """What is started travels to a new process by name, where vLLM's own is in its place."""
    stock = getattr(owner, name)
    with engine_processes_begin_with(first):
        assert getattr(owner, name) is not stock
        sent = pickle.dumps(getattr(owner, name))
    assert getattr(owner, name) is stock
    CALLS.clear()
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: CALLS.append((args, kwargs)))
    pickle.loads(sent)(1, dp_rank=2)
    assert CALLS == ["first", ((1,), {"dp_rank": 2})]


def test_start_that_fails_leaves_vllms_in_place():
    """Another engine of this process starts as usual."""
    stock = EngineCoreProc.run_engine_core
    with pytest.raises(ValueError, match="no start"), engine_processes_begin_with(first):
        raise ValueError("no start")
    assert EngineCoreProc.run_engine_core is stock
