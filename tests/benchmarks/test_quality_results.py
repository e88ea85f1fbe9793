"""The file of a quality benchmark, written and taken up again."""

import json

import pytest

from benchmarks.quality_results import Losses

KEY = ("copy", "none", 1.0)


def test_file_can_be_taken_up_again(tmp_path):
    """The next case joins those that are there."""
    path = tmp_path / "deep" / "results.json"
    first = Losses(path, "policy")
    first.add(KEY, [1.0, 2.0])
    first.write({"layers": [0]})
    again = Losses(path, "policy")
    assert again.resume({"layers": [0]}) == 1
    again.add(KEY, [4.0])
    again.write({"layers": [0]})
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["policy"], row["case_nll"], row["case_tokens"]) == ("none", [3.0, 4.0], [2, 1])
    assert row["nll"] == pytest.approx(7 / 3, abs=1e-4)


def test_other_settings_are_not_mixed_in(tmp_path):
    """A file of another measurement is refused."""
    losses = Losses(tmp_path / "results.json", "policy")
    losses.add(KEY, [1.0])
    losses.write({"layers": [0]})
    with pytest.raises(ValueError, match="layers"):
        losses.resume({"layers": [1]})


def test_one_arm_is_measured_again_and_the_others_stay(tmp_path):
    """Its rows are dropped, whatever their task and ratio."""
    path = tmp_path / "results.json"
    losses = Losses(path, "policy")
    for ratio in (0.5, 0.25):
        losses.add(("copy", "random", ratio), [1.0])
    losses.add(KEY, [2.0])
    losses.drop({"random"})
    losses.add(("copy", "random", 0.5), [3.0])
    losses.write({})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["policy"], row["nll"]) for row in rows] == [("none", 2.0), ("random", 3.0)]
