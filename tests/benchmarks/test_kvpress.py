"""kvpress beside our policies: same cases on both sides, and the documented tables are these."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kvpress_quality import Results, make_tee, parse_args
from benchmarks.kvpress_table import (
    PAIRS,
    TASKS,
    by_key,
    difference,
    first_cases,
    main,
    render,
    same_cases,
)

ROOT = Path(__file__).parents[2]
OURS = ROOT / "docs/evaluation/policy_quality.json"
THEIRS = ROOT / "docs/evaluation/kvpress_quality.json"


def make_row(losses: list[float], name: str = "none", keep: float = 1.0) -> dict[str, Any]:
    """A row of two-token cases, as either side writes it."""
    return {
        "task": "copy",
        "policy": name,
        "press": name,
        "keep_ratio": keep,
        "nll": sum(losses) / (2 * len(losses)),
        "num_tokens": 2 * len(losses),
        "num_cases": len(losses),
        "case_nll": losses,
        "case_tokens": [2] * len(losses),
    }


def make_sides(ours: list[float], theirs: list[float]) -> tuple[Any, Any]:
    """Full attention on both sides, and one policy of ours."""
    rows = [make_row(ours), make_row([x + 1 for x in ours], "h2o", 0.5)]
    return by_key({"rows": rows}, "policy"), by_key({"rows": [make_row(theirs)]}, "press")


def test_first_cases_recomputes_mean() -> None:
    """The mean per token is that of the cases that are left."""
    cut = first_cases(make_row([1.0, 3.0, 100.0]), 2)
    assert (cut["nll"], cut["num_tokens"], cut["num_cases"]) == (1.0, 4, 2)


def test_ours_is_cut_to_the_cases_of_kvpress() -> None:
    """Every row of ours, not only full attention, is cut to the cases the other side has."""
    cut = same_cases(*make_sides([1.0, 2.0, 9.0], [1.0, 2.001]))
    assert cut["copy", "h2o", 0.5]["case_nll"] == [2.0, 3.0]


def test_other_cases_are_refused() -> None:
    """Losses of full attention that differ mean other texts: no table is made of them."""
    with pytest.raises(ValueError, match="copy case 1 without eviction"):
        same_cases(*make_sides([1.0, 2.0, 9.0], [1.0, 3.0]))


def test_more_cases_than_ours_are_refused() -> None:
    """Cases that we never measured have no counterpart."""
    with pytest.raises(ValueError, match="longer"):
        same_cases(*make_sides([1.0], [1.0, 2.0]))


def test_difference_is_paired() -> None:
    """A constant shift has no error, however far the cases lie apart; minus is a real minus."""
    shifted = make_row([0.0, 50.0, 99.0])
    assert difference(shifted, make_row([1.0, 51.0, 100.0])) == "−0.50 ± 0.00"


class KeepFirst:
    """A press that leaves the first ``n`` tokens."""

    def __init__(self, n: int) -> None:
        self.n = n

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        """Keys and values ``[n, ...]``."""
        return keys[: self.n], values[: self.n]


def test_tee_keeps_what_each_press_leaves_and_changes_nothing() -> None:
    """One prefill serves all presses: the cache stays whole, each press's choice is kept."""
    tee = make_tee(SimpleNamespace(BasePress=object), [KeepFirst(1), KeepFirst(2)])
    keys, values = torch.arange(3), torch.arange(3) + 10
    for layer in (0, 1):
        module = SimpleNamespace(layer_idx=layer)
        assert tee.compress(module, None, keys, values, None, {}) == (keys, values)
        kept = [[t.tolist() for t in layers[layer]] for layers in tee.kept]
        assert kept == [[[0], [10]], [[0, 1], [10, 11]]]
    assert [sorted(layers) for layers in tee.kept] == [[0, 1], [0, 1]]


def test_results_are_rows_that_the_tables_read(tmp_path: Path) -> None:
    """What is written comes back with sums per case and the mean per token."""
    path = tmp_path / "deep" / "out.json"
    results = Results(path)
    for losses in ([1.0, 2.0], [3.0]):
        results.add(("copy", "none", 1.0), torch.tensor(losses))
    results.write({"kvpress": "0"})
    row = by_key(json.loads(path.read_text()), "press")["copy", "none", 1.0]
    assert (row["case_nll"], row["case_tokens"], row["nll"]) == ([3.0, 3.0], [2, 1], 2.0)


def test_defaults_make_the_cases_of_ours() -> None:
    """Without options it goes through the same tasks and repeats as the documented run of ours."""
    args = parse_args(["--model", "m", "--out", "o"])
    assert args.tasks.split(",") == list(TASKS)
    assert args.repeats == 6
    assert set(args.presses.split(",")) == {press for press, _ in PAIRS.values()}


def test_documented_tables_are_those_of_the_measured_files() -> None:
    """Every line of both tables stands in docs/policies.md, as the files give it."""
    text = (ROOT / "docs/policies.md").read_text()
    tables = render(OURS, THEIRS).split("\n\n")[:2]
    assert all(table in text for table in tables)


def test_command_prints_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented command prints what is documented."""
    monkeypatch.setattr("sys.argv", ["kvpress_table", str(OURS), str(THEIRS)])
    main()
    assert capsys.readouterr().out == render(OURS, THEIRS) + "\n"
