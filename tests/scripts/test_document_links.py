"""Links of the documents lead to files that are there, and to headings that these have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md") for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(path: Path) -> str:
    """The document without its blocks of code."""
    return _BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What GitHub calls the document's headings; the second of a name gets a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def broken_links(path: Path) -> list[str]:
    """Targets that are not there, as they are written."""
    broken = []
    for target, anchor in _LINK.findall(prose(path)):
        place = path.parent / target if target else path
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """To a file of the repository, and to one of its headings where one is named."""
    assert broken_links(path) == []


def test_documents_have_links_of_both_kinds() -> None:
    """Else nothing was checked."""
    found = [link for path in DOCUMENTS for link in _LINK.findall(prose(path))]
    assert sum(not anchor for _, anchor in found) > 20
    assert sum(bool(anchor) for _, anchor in found) > 20


def test_broken_links_are_found(tmp_path: Path) -> None:
    """The check above can fail: a file, a heading of another file, and one of its own."""
    (tmp_path / "b.md").write_text("# Of `two` words\n\n## Same\n\n## Same\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# Here\n[1](b.md) [2](b.md#of-two-words) [3](b.md#same-1) [4](#here) [5](http://x/y)\n"
        "[6](c.md) [7](b.md#same-2) [8](#there)\n```console\n[9](d.md)\n```\n"
    )
    assert broken_links(page) == ["c.md", "b.md#same-2", "#there"]
