"""Figures in the evaluation's running text are the results', or said to be computed, and how."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.loadtest.published import prose
from tests.loadtest.published.claims import CLAIMS, QUOTED
from tests.loadtest.published.computed import Claim
from tests.loadtest.published.numbers import number
from tests.loadtest.published.other_claims import PERFORMANCE, POLICIES, README
from tests.loadtest.published.results import DOCS, Result, load

PAGE = (DOCS / "evaluation.md").read_text()
SECTIONS = list(prose.sections(PAGE))
TEXT = " ".join(section.text for section in SECTIONS)
CLAIMS_BY_PAGE = {
    "evaluation.md": CLAIMS,
    "performance.md": PERFORMANCE,
    "policies.md": POLICIES,
    "../README.md": README,
}


@cache
def computed() -> list[str]:
    """Pieces of the evaluation's text."""
    return [claim.rendered() for claim in CLAIMS]


def make_result() -> Result:
    """One arm, one comparison."""
    arm = {
        "tps": {"mean": 49.53, "ci95": [48.32, 50.51]},
        "ms": {"mean": 14312.0, "ci95": [14100.0, 14500.0]},
        "share": {"mean": 0.672, "ci95": [0.666, 0.675]},
        "single": {"mean": 3.0, "ci95": None},
        "unknown": {"mean": None, "ci95": None},
    }
    comparison = {"ratio": 0.544, "ci95": [0.5394, 0.5473]}
    return Result("made", {"arms": {"a": arm}, "comparisons": {"tps: a / b": comparison}})


@pytest.mark.parametrize(
    ("name", "claim"),
    [(name, claim) for name, claims in CLAIMS_BY_PAGE.items() for claim in claims],
    ids=lambda value: value if isinstance(value, str) else f"{value.source}: {value.text[:40]}",
)
def test_computed_figures_are_on_the_page(name: str, claim: Claim) -> None:
    """What is computed here stands in the text, digit by digit."""
    page = (DOCS / name).read_text()
    text = " ".join(section.text for section in prose.sections(page))
    assert claim.rendered() in text, f"expected in docs/{name}: {claim.rendered()!r}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_figures_of_a_section_are_in_the_results_that_it_links_to(section: prose.Section) -> None:
    """Every other ratio, mean with interval, and range of the running text."""
    named = prose.load_all(section.sources)
    left = prose.without(section.text, [*QUOTED, *computed()])
    wrong = [found.text for found in prose.figures(left) if not prose.is_in(found, named)]
    assert not wrong, (
        f"neither in {section.sources} nor in tests/loadtest/published/claims.py: {wrong}"
    )


@pytest.mark.parametrize("quote", QUOTED)
def test_quoted_figures_are_on_the_page(quote: str) -> None:
    """The list of what cannot be computed holds nothing that is gone."""
    assert quote in TEXT


def test_durations_are_those_of_the_results() -> None:
    """Where the page says how long a scenario took."""
    told = list(prose.minutes(PAGE))
    assert len(told) == prose.flat(PAGE).count("It took ")  # none stands before its link
    for name, minutes in told:
        digits = len(minutes.partition(".")[2])
        assert number(load(name).data["load"]["minutes"], digits) == minutes, name


def test_section_has_neither_tables_nor_code_nor_targets_of_links() -> None:
    """Those are checked elsewhere, or are no figures."""
    page = (
        "# Page\nabove × 9\n## One *two*\n<!-- table: x -->\n| × 1 |\n<!-- end -->\n"
        "**a**\nb [c](evaluation/waste.json)\n```\n× 2\n```\n## Next\n× 3\n"
    )
    above, one, following = list(prose.sections(page))[1:]
    assert (above.title, above.text) == ("Page", "above × 9 ")
    assert (one.title, one.text.split(), one.sources) == ("One *two*", ["a", "b", "[c"], ("waste",))
    assert following.text == "× 3 "


@pytest.mark.parametrize(
    ("text", "value", "ends"),
    [
        ("is × 1.27 (1.26 … 1.30).", "1.27", ("1.26", "1.30")),
        ("is × 1.27 with `lazy` (1.26 … 1.30)", "1.27", ("1.26", "1.30")),
        ("(× 0.83, 0.80 … 0.84)", "0.83", ("0.80", "0.84")),
        ("−45.6 % (−45.3 … −46.1)", "−45.6", ("−45.3", "−46.1")),
        ("+ 0.036 nats (0.005 … 0.071)", "+0.036", ("0.005", "0.071")),
        ("took 1 335 ms (1 282 … 1 431)", "1 335", ("1 282", "1 431")),
        ("known to ± 0.005 … 0.008", "", ("0.005", "0.008")),
        ("of × 1.22: the", "1.22", None),
    ],
)
def test_figure_is_found(text: str, value: str, ends: tuple[str, str] | None) -> None:
    """Mean, interval and unit, however they are written."""
    (found,) = prose.figures(text)
    assert (found.value, found.ends) == (value, ends)
    assert found.is_ratio == ("×" in text)
    assert found.is_percent == ("%" in text)


def test_several_figures_are_told_apart() -> None:
    """Each interval belongs to the number before it; what has an interval is no single ratio."""
    text = "× 1.02 (0.99 … 1.05), × 1.14 (1.12 … 1.18) and × 0.94, 16 × 4 blocks"
    found = list(prose.figures(text))
    assert [figure.value for figure in found] == ["1.02", "1.14", "0.94", "4"]
    assert [figure.ends is None for figure in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        ("× 0.54 (0.54 … 0.55)", True),
        ("× 0.54 (0.54 … 0.56)", False),
        ("× 1.84 (1.83 … 1.85)", True),  # the inverse
        ("× 0.544", False),  # alone it could be too many
        ("−45.6 % (−45.3 … −46.1)", True),
        ("45.6 % (45.3 … 46.1)", True),
        ("67.2 % (66.6 … 67.5)", True),
        ("67.3 % (66.6 … 67.5)", False),
        ("49.5 (48.3 … 50.5)", True),
        ("14.3 s (14.1 … 14.5)", True),
        ("0.672 (0.666 … 0.675)", True),
        ("3 (2 … 4)", False),
        ("from 48.3 … 50.5", False),  # a bare range has no mean to look for
    ],
)
def test_figure_is_looked_for_in_a_result(text: str, is_there: bool) -> None:
    """All of mean and ends, to the digits that are shown."""
    (found,) = prose.figures(text)
    assert prose.is_in(found, [make_result()]) is is_there
    assert not prose.is_in(found, [])


def test_computed_pieces_are_taken_out_before_the_rest_is_looked_for() -> None:
    """What stands around them does not run together."""
    assert prose.without("a × 1 b × 2 c", ["× 1 b"]) == "a  ;  × 2 c"


def test_duration_belongs_to_the_link_before_it() -> None:
    """Not to one further up."""
    links = [f"[{name}](evaluation/{name}.json)." for name in "abc"]
    page = f"{links[0]} {links[1]} It took\n12 minutes. {links[2]}"
    assert list(prose.minutes(page)) == [("b", "12")]


def test_no_claim_has_an_empty_place() -> None:
    """A cell that says nothing, such as of an arm against itself, is a mistake in the list."""
    for claim in (claim for claims in CLAIMS_BY_PAGE.values() for claim in claims):
        assert len(re.findall(r"\{\}", claim.text)) == len(claim.cells)
        assert not re.search(r"(\s|^)[,;)]", claim.rendered())
