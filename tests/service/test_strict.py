"""A name that stands twice in one object is refused, and only that."""

from __future__ import annotations

import json

import pytest
import yaml

from service.strict import RepeatedError, StrictLoader, members


@pytest.mark.parametrize(
    "text", ['{"a": 1, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]}', "{}", "[1]"]
)
def test_other_objects_are_read_as_ever(text):
    """By both readers."""
    assert json.loads(text, object_pairs_hook=members) == json.loads(text)
    assert yaml.load(text, StrictLoader) == json.loads(text)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 0, "a": null}}]'])
def test_name_that_stands_twice_is_refused(text):
    """At any depth, with equal values, too."""
    for read in (
        lambda: json.loads(text, object_pairs_hook=members),
        lambda: yaml.load(text, StrictLoader),
    ):
        with pytest.raises(RepeatedError, match="'a' is given twice") as refused:
            read()
        assert refused.value.name == "a"


def test_merged_members_may_be_overridden():
    """That is what YAML's ``<<`` is for; other kinds of keys are no business of ours."""
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\nz: {<<: *x}\n1: one\n'1': text"
    found = yaml.load(text, StrictLoader)
    assert found["y"] == {"a": 3, "b": 2}
    assert (found["z"], found[1], found["1"]) == ({"a": 1, "b": 2}, "one", "text")
