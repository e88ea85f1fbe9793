"""Tables between markers on a page: found, compared cell by cell, and written anew.

<!-- table: waste -->
| policy | F |
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from tests.loadtest.published.tables import Table, cells_of, markdown

MARKED = re.compile(r"(?<=<!-- table: )(?P<name>[^\n]+?) -->\n(?P<text>.*?)(?=<!-- end -->)", re.S)


def marked(text: str) -> dict[str, str]:
    """Tables between markers, by name, in the order of the page."""
    return {found["name"]: found["text"] for found in MARKED.finditer(text)}


def written(text: str, tables: Sequence[Table]) -> str:
    """The page with these tables made anew; markers of others stay as they are."""
    made = {table.name: markdown(table) for table in tables}
    return MARKED.sub(
        lambda found: f"{found['name']} -->\n{made.get(found['name'], found['text'])}", text
    )


def differences_of(text: str, tables: Sequence[Table]) -> Iterator[str]:
    """Of a whole page: cells that differ, and tables without markers or markers without tables."""
    found = marked(text)
    known = {table.name: table for table in tables}
    yield from (f"no table is called {name}" for name in found if name not in known)
    yield from (f"table {name} has no markers" for name in known if name not in found)
    for name in filter(known.__contains__, found):
        yield from differences(found[name], known[name])


def differences(text: str, table: Table) -> Iterator[str]:
    """A sentence per cell of a table that is not what its JSON says; also of a row too many.

    Args:
        text: of the table on the page.
        table: what it should be.
    """
    expected = markdown(table)
    if text == expected:
        return
    head, *_ = cells_of(expected)
    pairs = zip_longest(cells_of(text), cells_of(expected), fillvalue=list[str]())
    source = f"evaluation/{table.source}.json" if table.source else "the JSON"
    count = 0
    for i, (actual, wanted) in enumerate(pairs):
        label = ", ".join((wanted or actual)[: len(table.labels)])
        for column, here, there in zip_longest(head, actual, wanted, fillvalue=""):
            if here != there:
                count += 1
                where = f"table {table.name}, row {i} ({label}), column {column!r}"
                yield f"{where}: the page has {here!r}, {source} {there!r}"
    if not count:
        yield f"table {table.name}: spaces or alignment differ from what is rendered"
