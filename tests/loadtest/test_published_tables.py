"""Every figure in the rendered tables is its JSON's, and a mistyped one is named."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.loadtest.published import cells, page
from tests.loadtest.published.numbers import bold, interval, number
from tests.loadtest.published.pages import HAND_WRITTEN, PAGES
from tests.loadtest.published.results import DOCS, Figure, Result
from tests.loadtest.published.tables import Column, Row, Table, cells_of, markdown

WRITE = "python -m tests.loadtest.published --write"


def make_result() -> Result:
    """Two arms of one metric, compared; the second has no copies and never knew its F."""
    arms = {
        "lazy@9": {
            "tps": {"mean": 1612.4, "ci95": [1598.0, 1631.0], "samples": [1598.0, 1631.0]},
            "copies": {"mean": 3.4, "ci95": [3.0, 4.0], "samples": [3.0, 4.0]},
            "f": {"mean": 0.2501, "ci95": [0.2499, 0.2502], "samples": [0.2499, 0.2502]},
        },
        "naive@9": {
            "tps": {"mean": 806.2, "ci95": None, "samples": [806.2]},
            "f": {"mean": None, "ci95": None, "samples": [None]},
        },
    }
    ratio = {"ratio": 1.2656, "ci95": [1.255, 1.2989]}
    return Result("made", {"arms": arms, "comparisons": {"tps: lazy@9 / naive@9": ratio}})


def make_table(rows: Sequence[Row]) -> Table:
    """A table of cells that are given, with no JSON."""
    return Table("made", "", ["arm", "mode"], [Column("F"), Column("copies")], rows)


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_what_the_results_say(name: str) -> None:
    """No cell was mistyped, and none is of a result that was replaced since."""
    found = list(page.differences_of((DOCS / name).read_text(), PAGES[name]))
    assert not found, "\n".join([*found, f"{WRITE} writes what the JSONs say"])


@pytest.mark.parametrize("name", PAGES)
def test_every_table_is_rendered_or_known_to_be_written_by_hand(name: str) -> None:
    """Nobody pastes a table of figures without a test that recomputes them."""
    text = page.MARKED.sub("", (DOCS / name).read_text())
    heads = re.findall(r"^( *\|.*)\n *\|[-:|]+$", text, re.M)
    assert heads == HAND_WRITTEN[name], "render it, or name its head in HAND_WRITTEN"


@pytest.mark.parametrize("name", PAGES)
def test_names_of_tables_are_unique(name: str) -> None:
    """A marker names one table, and a table has one place."""
    names = [table.name for table in PAGES[name]]
    assert len(set(names)) == len(names)
    assert len(re.findall(r"^<!-- table: ", (DOCS / name).read_text(), re.M)) == len(names)


def test_mistyped_cell_is_named_with_both_values() -> None:
    """Row, column, what the page has and what the JSON says."""
    table = make_table([Row(["a", "lazy"], cells=["0.25", "7"])])
    (found,) = page.differences(markdown(table).replace("0.25", "0.52"), table)
    assert "row 1 (a, lazy), column 'F'" in found
    assert "the page has '0.52'" in found
    assert found.endswith("'0.25'")


def test_missing_and_superfluous_rows_are_named() -> None:
    """A row that was forgotten differs in every cell that is not empty."""
    row, more = Row(["a", "lazy"], cells=["1", "2"]), Row(["b", "lazy"], cells=["3", "4"])
    short, long = make_table([row]), make_table([row, more])
    assert len(list(page.differences(markdown(short), long))) == 4
    assert len(list(page.differences(markdown(long), short))) == 4


def test_table_that_only_looks_the_same_is_told() -> None:
    """Rendering leaves nothing to chance: not spaces, not alignment."""
    table = make_table([Row(["a", "lazy"], cells=["1", "2"])])
    (found,) = page.differences(markdown(table).replace("| 1 |", "|  1 |"), table)
    assert "spaces or alignment" in found


def test_page_is_written_between_markers_only() -> None:
    """Prose and tables of others stay; writing twice changes nothing."""
    table = make_table([Row(["a", "lazy"], cells=["1", "2"])])
    text = "before\n<!-- table: made -->\nold\n<!-- end -->\nafter\n<!-- table: x -->\n<!-- end -->"
    new = page.written(text, [table])
    assert page.marked(new) == {"made": markdown(table), "x": ""}
    assert new.replace(markdown(table), "old\n") == text
    assert page.written(new, [table]) == new


def test_markers_and_tables_must_pair() -> None:
    """A table without a place, or a place without a table, is an error."""
    table = make_table([Row(["a", "lazy"], cells=["1", "2"])])
    found = list(page.differences_of("<!-- table: x -->\n<!-- end -->\n", [table]))
    assert found == ["no table is called x", "table made has no markers"]


def test_repeated_first_label_is_left_out() -> None:
    """As in a printed table; the alignment is labels left, figures right."""
    rows = [Row(["a", mode], cells=["1", ""]) for mode in ("naive", "lazy")]
    text = markdown(make_table(rows))
    rule, first, second = text.splitlines()[1:]
    assert rule == "|---|---|---:|---:|"
    assert first == "| a | naive | 1 | |"
    assert second == "| | lazy | 1 | |"
    assert cells_of(text)[2] == ["", "lazy", "1", ""]


def test_row_may_replace_single_cells() -> None:
    """Where a figure would mislead, words stand instead."""
    table = Table(
        "made",
        "",
        ["arm"],
        [Column("F", "0.5"), Column("running", "6.5")],
        [Row(["a"], instead={1: "all"})],
    )
    assert table.body() == [["a", "0.5", "all"]]


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (1612.4, {}, "1 612"),
        (1612.4, {"nearest": 10}, "1 610"),
        (-0.0123, {"digits": 2}, "−0.01"),
        (-0.001, {"digits": 2}, "0.00"),
        (19.0, {"digits": 1}, "19.0"),
    ],
)
def test_number(value: float, options: dict[str, int], text: str) -> None:
    """Thousands apart, a true minus, and none before a zero."""
    assert number(value, **options) == text


def test_interval_that_rounds_to_one_number_is_left_out() -> None:
    """It would say nothing more; neither would that of a single sample."""
    assert interval(Figure(1.0, 0.996, 1.004), 2) == ""
    assert interval(Figure(1.0, 0.994, 1.004), 2) == " (0.99 … 1.00)"
    assert interval(Figure(1.0), 2) == ""
    assert bold("63.8 (63.2 … 64.6)") == "**63.8** (63.2 … 64.6)"
    assert bold("9") == "**9**"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (cells.mean("tps", 0, "lazy@{}"), "1 612 (1 598 … 1 631)"),
        (cells.mean("tps", 1, "lazy@{}", scale=1e-3, unit=" s"), "1.6 s"),
        (cells.plain("tps", 0, "lazy@{}", nearest=100), "1 600"),
        (cells.percent("f", 1, "lazy@{}"), "25.0 %"),
        (cells.mean("f", 1, "naive@{}", missing="–"), "–"),
        (cells.plain("copies", 0, "naive@{}", missing=""), ""),
        (cells.extremes("copies", "lazy@{}"), "3 to 4"),
        (cells.ratio("tps", "naive@{}", "lazy@{}"), "× 1.27 (1.25 … 1.30)"),
        (cells.ratio("tps", "lazy@{}", "naive@{}"), ""),
        (cells.paired_ratio("f", "lazy@{}", "lazy@{}"), ""),
        (cells.detail("arms", "lazy@{}", "tps", "mean"), "1 612"),
        (cells.marked(cells.mean("copies", 0, "lazy@{}")), "**3** (3 … 4)"),
        (cells.joined(" / ", *[cells.plain("copies", 0, "lazy@{}")] * 2), "3 / 3"),
    ],
)
def test_cell(cell: cells.Cell, text: str) -> None:
    """Each kind of cell, of a row whose key is 9."""
    assert cell(make_result(), "9") == text


def test_cell_of_a_metric_that_is_missing_by_mistake_is_refused() -> None:
    """A table says what stands for a figure that an arm cannot have; others must be there."""
    with pytest.raises(AssertionError, match="lazy@9 has no copied"):
        cells.mean("copied", arm="lazy@{}")(make_result(), "9")
    with pytest.raises(KeyError, match="lazy@8"):
        cells.mean("tps", arm="lazy@{}")(make_result(), "8")
    with pytest.raises(AssertionError, match="lazy@9 / stock@9"):
        cells.ratio("tps", "stock@{}", "lazy@{}")(make_result(), "9")


def test_paired_ratio_is_of_the_samples_of_the_same_repeats() -> None:
    """As the scenarios themselves compare, with the same statistics."""
    samples = {"a": [2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0]}
    arms = {arm: {"tps": {"samples": values}} for arm, values in samples.items()}
    found = Result("made", {"arms": arms}).paired_ratio("tps", "a", "b")
    assert [found.value, found.low, found.high] == pytest.approx([2, 2, 2])
