"""The published results are whole, and the page about them names the command of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadtest import scenarios

DOCS = Path(__file__).parents[2] / "docs"
NAMES = [name for name in scenarios.NAMES if name != "bookkeeping"]  # has a format of its own
OURS = [
    path
    for path in sorted((DOCS / "evaluation").glob("*.json"))
    if path.stem.partition("_")[0] in NAMES  # SCENARIO.json or SCENARIO_WORKLOAD.json
]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_result_is_named_with_its_command(path):
    """A reader can repeat it, and find the file."""
    page = (DOCS / "evaluation.md").read_text()
    result = json.loads(path.read_text())
    assert result["command"] in page
    assert f"evaluation/{path.name}" in page
    assert result["scenario"] == path.stem.partition("_")[0]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_result_says_on_what_and_with_how_many_samples(path):
    """Machine, load, versions, and an interval wherever there is more than one sample."""
    result = json.loads(path.read_text())
    assert result["machine"]["cores"] > 0
    assert result["load"]["before"]
    assert "python" in result["versions"]
    for arm in result["arms"].values():
        for metric in arm.values():
            assert (metric["ci95"] is None) is (len(metric["samples"]) == 1)
    assert not re.search(r"/(home|root|work|tmp|opt)/", path.read_text())


def test_every_scenario_is_described():
    """The page has a row for each."""
    page = (DOCS / "evaluation.md").read_text()
    for name in scenarios.NAMES:
        assert f"| `{name}` |" in page
