"""Slot rows against a dictionary of lists, and their errors."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.integration.peak_memory import PeakMemory
from vtoken.errors import TokenTableError
from vtoken.integration.vllm import device_rows
from vtoken.integration.vllm.device_rows import DeviceSlotRows
from vtoken.integration.vllm.slot_rows import SlotRows
from vtoken.kv_view import SlotGeometry

GEOMETRY = SlotGeometry(block_size=4, num_kv_heads=3, head_size=8)
MAX_REQS, MAX_LEN, NUM_SLOTS = 4, 30, 400


def make_host_rows():
    return SlotRows(MAX_REQS, MAX_LEN, GEOMETRY)


def make_device_rows():
    return DeviceSlotRows(MAX_REQS, MAX_LEN, GEOMETRY, torch.device("cpu"))


@pytest.fixture(params=[make_host_rows, make_device_rows], ids=["host", "device"])
def make_rows(request):
    """Rows of either runner."""
    return request.param


def slots(*numbers):
    return np.array(numbers, np.int32)


def append(rows, req_ids, num_new, write):
    rows.append(rows.rows(req_ids), np.array(num_new, np.int32), np.array(write, np.int64))


class RowsAgainstDictionary(RuleBasedStateMachine):
    """Random rows, drops and mixed steps; the model is ``{req_id: [canonical slots]}``."""

    make_rows = staticmethod(make_host_rows)

    @initialize()
    def start(self):
        self.rows = self.make_rows()
        self.model = {}
        self.address = self.rows.table.data_ptr()

    @rule(data=st.data(), live=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=MAX_LEN))
    def set_row(self, data, live):
        """New requests while there is room, otherwise structural changes of known ones."""
        names = "abcdefg" if len(self.model) < MAX_REQS else sorted(self.model)
        req_id = data.draw(st.sampled_from(names))
        self.rows.set_row(req_id, slots(*live))
        self.model[req_id] = list(live)

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def drop_columns(self, data):
        """Tokens of some requests die."""
        full = sorted(req_id for req_id, live in self.model.items() if live)
        dropped = {}
        for req_id in data.draw(st.lists(st.sampled_from(full), min_size=1, unique=True)):
            columns = st.integers(0, len(self.model[req_id]) - 1)
            dropped[req_id] = np.array(sorted(data.draw(st.sets(columns, min_size=1))))
        self.rows.drop_columns(dropped)
        for req_id, columns in dropped.items():
            self.model[req_id] = np.delete(self.model[req_id], columns).tolist()

    @rule(gone=st.sets(st.sampled_from("abcdefg"), max_size=3))
    def drop(self, gone):
        """Finished and preempted requests, known or not."""
        self.rows.drop(gone)
        for req_id in gone:
            self.model.pop(req_id, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data):
        """Part of the requests, in any order, decodes and prefills mixed."""
        batch = data.draw(st.permutations(sorted(self.model)))
        batch = batch[: data.draw(st.integers(1, len(batch)))]
        room = [self.rows.width - len(self.model[req_id]) for req_id in batch]
        num_new = [data.draw(st.integers(min(1, r), min(r, 7))) for r in room]
        write = data.draw(
            st.lists(st.integers(0, NUM_SLOTS - 1), min_size=sum(num_new), max_size=sum(num_new))
        )
        append(self.rows, batch, num_new, write)
        for req_id, count in zip(batch, num_new, strict=True):
            self.model[req_id] += write[:count]
            write = write[count:]

    @invariant()
    def lengths_equal_the_model(self):
        """Lengths and the free list agree with the model, and nothing was allocated anew."""
        assert len(self.rows) == len(self.model)
        assert self.rows.table.data_ptr() == self.address
        for req_id, live in self.model.items():
            assert self.rows.lens(self.rows.rows([req_id])).tolist() == [len(live)]

    @rule()
    def read(self):
        """Canonical rows and kernel slots; rarely, for reading writes out what is staged."""
        for req_id, live in self.model.items():
            assert self.rows.canonical(req_id).tolist() == live
            (row,) = self.rows.rows([req_id])
            kernel = self.rows.table[int(row), : len(live)].numpy()
            assert kernel.tolist() == [s // 4 * 24 + s % 4 for s in live]

    def teardown(self):
        """Whatever the rules were, in the end the rows are right."""
        if hasattr(self, "rows"):
            self.read()


class DeviceRowsAgainstDictionary(RowsAgainstDictionary):
    """The same for a table on a device."""

    make_rows = staticmethod(make_device_rows)


TestRowsAgainstDictionary = RowsAgainstDictionary.TestCase
TestRowsAgainstDictionary.settings = settings(max_examples=40, stateful_step_count=25)
TestDeviceRowsAgainstDictionary = DeviceRowsAgainstDictionary.TestCase
TestDeviceRowsAgainstDictionary.settings = TestRowsAgainstDictionary.settings


def test_width_leaves_a_block_beyond_the_longest_request(make_rows):
    """30 tokens are 8 blocks of 4, plus one block."""
    assert make_rows().width == 36


def test_row_survives_steps_without_the_request(make_rows):
    """A request that is merely not scheduled keeps its row, wherever the batch goes."""
    rows = make_rows()
    rows.set_row("a", slots(8, 9))
    rows.set_row("b", slots())
    append(rows, ["b"], [3], [20, 21, 22])
    append(rows, ["b", "a"], [1, 1], [23, 10])
    assert rows.canonical("a").tolist() == [8, 9, 10]
    assert rows.canonical("b").tolist() == [20, 21, 22, 23]


def test_dropped_rows_are_given_to_others(make_rows):
    """The free list never runs dry through finish and preemption."""
    rows = make_rows()
    for i in range(10 * MAX_REQS):
        rows.set_row(f"r{i}", slots(i))
        rows.drop([f"r{i}", "never seen"])
    assert len(rows) == 0


def test_scheduled_request_without_row_is_an_error_with_numbers(make_rows):
    """A row that the scheduler forgot to send is named."""
    rows = make_rows()
    rows.set_row("a", slots())
    with pytest.raises(TokenTableError, match=r"2 of 3 .* first 'x'; .* 1 requests"):
        rows.rows(["a", "x", "y"])


def test_more_requests_than_rows_is_an_error(make_rows):
    """The table does not grow: its address is fixed."""
    rows = make_rows()
    for i in range(MAX_REQS):
        rows.set_row(f"r{i}", slots())
    with pytest.raises(TokenTableError, match="'late': all 4 are taken"):
        rows.set_row("late", slots())


def test_rows_longer_than_the_table_are_refused(make_rows):
    """Both ways to grow a row check its width and change nothing."""
    rows = make_rows()
    with pytest.raises(TokenTableError, match="37 live tokens, a row holds 36"):
        rows.set_row("a", slots(*range(37)))
    rows.set_row("a", slots(*range(35)))
    with pytest.raises(TokenTableError, match="37 of 36"):
        append(rows, ["a"], [2], [50, 51])
    assert rows.canonical("a").tolist() == list(range(35))


def test_write_slots_must_match_the_new_tokens(make_rows):
    """A mismatch between vLLM's slot mapping and the scheduled counts is caught."""
    rows = make_rows()
    rows.set_row("a", slots())
    with pytest.raises(TokenTableError, match="3 write slots for 2 new tokens"):
        append(rows, ["a"], [2], [1, 2, 3])


def test_columns_beyond_the_row_are_refused(make_rows):
    """A scheduler that counts otherwise than the worker is caught, and nothing changes."""
    rows = make_rows()
    rows.set_row("a", slots(5, 6))
    rows.set_row("b", slots(7, 8, 9))
    with pytest.raises(TokenTableError, match="column 2 of request 'a' is to go, its row has 2"):
        rows.drop_columns({"b": np.array([0]), "a": np.array([0, 2])})
    with pytest.raises(TokenTableError, match="have no slot row"):
        rows.drop_columns({"x": np.array([0])})
    assert [rows.canonical(req_id).tolist() for req_id in "ab"] == [[5, 6], [7, 8, 9]]


def test_many_rows_are_rewritten_in_parts(make_rows, monkeypatch):
    """What a device needs beside its table is bounded, and parts give the same rows."""
    monkeypatch.setattr(device_rows, "WORK_BYTES", 50 * device_rows._COLUMN_BYTES)
    rows = make_rows()
    for i in range(MAX_REQS):
        rows.set_row(str(i), slots(*range(40 * i, 40 * i + 20)))
    rows.drop_columns({str(i): np.array([i, 19]) for i in range(MAX_REQS)})
    for i in range(MAX_REQS):
        left = [40 * i + c for c in range(19) if c != i]
        assert rows.canonical(str(i)).tolist() == left


@pytest.mark.parametrize("num_dying", [1, 3000])
def test_a_long_row_that_is_cut_stretches_no_other(monkeypatch, num_dying):
    """Neither its length nor its many columns that die, nor columns that nobody has reached."""
    limit = 400_000
    monkeypatch.setattr(device_rows, "WORK_BYTES", limit)
    rows = DeviceSlotRows(200, 20_000, GEOMETRY, torch.device("cpu"))
    lens = {str(i): 5000 if i == 7 else 40 for i in range(200)}
    for req_id, length in lens.items():
        rows.set_row(req_id, np.arange(length, dtype=np.int32))
    rows.canonical("7")
    dropped = {r: np.arange(min(num_dying, n - 3)) + 2 for r, n in lens.items()}
    with PeakMemory() as peak:
        rows.drop_columns(dropped)
    assert limit / 3 < peak.num_bytes <= limit
    for req_id, length in lens.items():
        left = np.delete(np.arange(length), dropped[req_id])
        assert rows.canonical(req_id).tolist() == left.tolist()


def test_device_rows_are_written_once_per_step(monkeypatch):
    """All rows of a message go over in one scatter, the step's new tokens in another; only what
    would take too much beside the table goes over in parts."""
    rows, writes = make_device_rows(), []
    put = DeviceSlotRows._put
    monkeypatch.setattr(
        DeviceSlotRows, "_put", lambda self, *args: writes.append(len(args[0])) or put(self, *args)
    )
    rows.set_row("a", slots(1, 2, 3))
    rows.set_row("b", slots(9))
    rows.set_row("b", slots(7, 8))
    assert writes == []
    append(rows, ["b", "a"], [1, 2], [20, 21, 22])
    assert writes == [5, 3]
    append(rows, ["a"], [1], [23])
    assert writes == [5, 3, 1]
    assert rows.canonical("a").tolist() == [1, 2, 3, 21, 22, 23]
    assert rows.canonical("b").tolist() == [7, 8, 20]
    monkeypatch.setattr(device_rows, "WORK_BYTES", 3 * 12)
    writes.clear()
    lists = {"a": [1, 2, 3, 4], "b": [], "c": [5], "d": [6, 7]}
    for req_id, some in lists.items():
        rows.set_row(req_id, slots(*some))
    assert [rows.canonical(req_id).tolist() for req_id in lists] == list(lists.values())
    assert writes == [1, 2, 4]


def test_write_slots_may_be_a_tensor(make_rows):
    """As V2 has them."""
    rows = make_rows()
    rows.set_row("a", slots(5))
    rows.append(rows.rows(["a"]), np.array([2], np.int32), torch.tensor([6, 40]))
    assert rows.canonical("a").tolist() == [5, 6, 40]
