"""Rows of signals: what they take, and that signals which stay keep their memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.observation import (
    ATTENTION_HISTORY,
    ATTENTION_LAST,
    ATTENTION_SIGNALS,
    ATTENTION_SUM,
    KEY_NORM,
    SIGNALS,
)
from vtoken.signal_rows import SignalRows, bytes_per_column


@pytest.mark.parametrize(
    "signals", [frozenset[str](), frozenset({KEY_NORM}), frozenset({ATTENTION_HISTORY}), SIGNALS]
)
def test_bytes_per_column_are_those_of_the_buffers(signals: frozenset[str]) -> None:
    """Signals of the cache have none."""
    buffers = SignalRows(signals, 3, 7)._buffers.values()
    assert sum(buffer.nbytes for buffer in buffers) == 3 * 7 * bytes_per_column(signals)
    assert bytes_per_column(ATTENTION_SIGNALS) == bytes_per_column(SIGNALS) == 20


def test_a_signal_that_stays_keeps_its_memory_and_its_observations() -> None:
    """Others start from zero; one that left is gone."""
    before = SignalRows(frozenset({ATTENTION_SUM, ATTENTION_LAST}), 2, 4)
    mass = torch.tensor([[[0.5, 0.25, 0.25, 0.0]]])
    before.add(torch.tensor([1]), mass, torch.tensor([[3]]), torch.tensor([False]))
    after = SignalRows(frozenset({ATTENTION_SUM, ATTENTION_HISTORY}), 2, 4, before=before)
    kept = frozenset({ATTENTION_SUM})
    assert after._buffers[ATTENTION_SUM] is before._buffers[ATTENTION_SUM]
    assert after.observed(1, kept) == 3
    assert after.read(1, 3, kept)[ATTENTION_SUM].tolist() == [0.5, 0.25, 0.25]
    assert after.observed(1, frozenset({ATTENTION_HISTORY})) == 0
    assert after._buffers.keys() == {ATTENTION_SUM, ATTENTION_HISTORY}


def test_dropped_columns_leave_zeros_behind_the_row() -> None:
    """Of what was observed; later columns were zero before."""
    rows = SignalRows(frozenset({ATTENTION_LAST}), 1, 5)
    mass = torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0.0]]])
    rows.add(torch.tensor([0]), mass, torch.tensor([[4]]), torch.tensor([True]))
    rows.drop(0, np.array([1, 4]))
    assert rows._buffers[ATTENTION_LAST][0].tolist() == pytest.approx([0.1, 0.3, 0.4, 0.0, 0.0])
    assert rows.observed(0, frozenset({ATTENTION_LAST})) == 3
