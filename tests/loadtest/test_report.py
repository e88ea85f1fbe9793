"""The files that a scenario leaves behind."""

from __future__ import annotations

import json
import re
import socket

import pytest

from loadtest import machine, plots, report
from loadtest.outcome import Outcome

LOAD = {"before": [0.1, 0.1, 0.1], "after": [0.2, 0.2, 0.2], "minutes": 1.5}


@pytest.fixture
def result() -> dict:
    outcome = Outcome(config={"engine": ["--block-size", "16"]}, not_measured=["The rest."])
    for repeat in range(3):
        outcome.add("a@1", {"m": 1 + repeat, "n": 5})
        outcome.add("b@1", {"m": 2 + repeat})
    outcome.compare("a@1", "b@1", ("m",))
    return report.build("waste", outcome, command="x", size="quick", load=LOAD, notes=["A note."])


def test_json_reads_back_and_keeps_lists_of_samples_on_a_line(tmp_path, result):
    """A change of one arm is a change of few lines."""
    path = report.write(result, tmp_path / "new")
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert '"samples": [1.0, 2.0, 3.0]' in path.read_text()


def test_result_names_neither_host_nor_path(result):
    """It can be published as it is."""
    text = json.dumps(result)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert not re.search(r"/(home|root|work|tmp|opt)/", text)


def test_markdown_has_everything_a_reader_needs(result):
    """Machine, load, versions, tables, notes, what was not measured, and the configuration."""
    text = report.markdown(result)
    for part in ("# waste (quick)", "`x`", "cores", "Load average before", "python 3", "| a@1"):
        assert part in text
    for part in ("m: a@1 / b@1", "* A note.", "Not measured: The rest.", "--block-size"):
        assert part in text


def test_tables_are_aligned_markdown(result):
    """Missing metrics are dashes; intervals of width zero are left out."""
    lines = report.table(result).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "5 " in lines[2]
    assert "–" in lines[3]
    assert report.comparison_table({"comparisons": {}}) == ""


def test_machine_and_versions_are_described():
    """Model, cores, memory, system; Python and the packages that are there."""
    found = machine.describe_machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["os"]
    assert "numpy" in machine.describe_versions()
    assert len(machine.load_average()) == 3


def test_missing_machine_facts_are_empty(tmp_path):
    """Rather than an error on another system."""
    assert machine._field(tmp_path / "none", "model name") == ""
    assert machine._kib("") == 0


def test_plots_are_drawn_as_bars_and_lines(tmp_path, result):
    """Both kinds become PNG files; a metric that nobody has becomes none."""
    wanted = [
        {"metric": "m", "title": "bars"},
        {"metric": "n", "title": "lines", "x": "number"},
        {"metric": "z", "title": "nothing"},
    ]
    paths = plots.draw(result, wanted, tmp_path)
    assert [p.name for p in paths] == ["waste_m.png", "waste_n.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_without_matplotlib_there_are_no_plots(tmp_path, result, monkeypatch, caplog):
    """A warning, not an error."""
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert plots.draw(result, [{"metric": "m", "title": "t"}], tmp_path) == []
    assert "matplotlib" in caplog.text
