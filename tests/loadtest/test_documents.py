"""Long texts: which source is taken, and pieces of it."""

from __future__ import annotations

import gzip
import random

import pytest

from loadtest import documents
from loadtest.documents import (
    Document,
    excerpt,
    generated_document,
    load_document,
    system_documents,
)


def test_generated_text_is_long_and_the_same_everywhere():
    """Its beginning is pinned; another seed gives another text."""
    document = generated_document()
    assert len(document.text) > documents.MIN_CHARACTERS
    assert document.text == generated_document().text
    assert document.text != generated_document(seed=1).text
    assert load_document(only_generated=True) == document


def test_downloaded_package_is_preferred_to_the_generated_text(tmp_path, monkeypatch):
    """A package unpacked earlier is found in the cache folder."""
    monkeypatch.setattr(documents.shutil, "which", lambda name: None)
    monkeypatch.setattr(documents, "_DOC", tmp_path / "none")
    monkeypatch.setattr(documents, "_REFERENCE", documents.Path("no/such/place.txt.gz"))
    assert load_document(tmp_path).source == "generated text"
    path = tmp_path / documents.PACKAGE / "no/such/place.txt.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b"long " * documents.MIN_CHARACTERS))
    assert load_document(tmp_path).source == documents.PACKAGE


def test_short_source_is_passed_over(tmp_path, monkeypatch):
    """A text that is too short for the workloads is none."""
    monkeypatch.setattr(documents, "_reference", lambda root, name: Document(name, "short"))
    monkeypatch.setattr(documents, "_DOC", tmp_path / "none")
    assert load_document(tmp_path).source == "generated text"


def test_system_documents_are_joined_in_order(tmp_path):
    """News and readme files of packages, packed or not; a damaged one is left out."""
    for name, text in (("b/README", b"second"), ("a/NEWS.gz", gzip.compress(b"first"))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "a" / "README.gz").write_bytes(b"not gzip")
    assert system_documents(tmp_path).text == "first\n\nsecond"
    assert system_documents(tmp_path / "none") is None


def test_excerpt_begins_at_a_word_and_has_its_length():
    """A seed gives a place."""
    document = generated_document()
    piece = excerpt(document, 1000, random.Random(3))
    assert len(piece) == 1000
    assert piece == excerpt(document, 1000, random.Random(3))
    assert document.text[document.text.index(piece) - 1] in " \n"
    with pytest.raises(ValueError, match="characters only"):
        excerpt(Document("x", "short"), 10, random.Random(0))
