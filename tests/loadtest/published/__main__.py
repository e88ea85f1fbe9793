"""Writes the tables of docs/ anew from the published JSONs, or says where they differ.

python -m tests.loadtest.published --write
python -m tests.loadtest.published --check    # exit code 1 if a cell is not what its JSON says
"""

from __future__ import annotations

import argparse
import sys

from tests.loadtest.published.page import differences_of, written
from tests.loadtest.published.pages import PAGES
from tests.loadtest.published.results import DOCS


def main() -> int:
    """Write all pages, or compare them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.loadtest.published")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found: list[str] = []
    for name, tables in PAGES.items():
        path = DOCS / name
        text = path.read_text(encoding="utf-8")
        if options.write:
            path.write_text(written(text, tables), encoding="utf-8")
        else:
            found += (f"docs/{name}, {line}" for line in differences_of(text, tables))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
