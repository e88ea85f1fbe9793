"""Files that share an engine are run by one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SHARED

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("file", sorted({*SHARED, *SHARED.values()}))
def test_files_are_there_and_start_engines(file: str) -> None:
    """A file that was renamed would be run elsewhere without a word."""
    assert "pytest.mark.engine" in (ROOT / file).read_text()


def test_each_file_names_its_process_in_one_step() -> None:
    """Whose name is taken is no file that takes another's."""
    assert not SHARED.keys() & set(SHARED.values())
