"""A path that leads to another file, or to another content, is told from one that does not."""

from __future__ import annotations

import os

from service.fingerprint import fingerprint


def test_changes_with_the_file_and_with_where_a_link_leads(tmp_path):
    """Written, replaced, led elsewhere, taken away; the same link made anew is no change."""
    one, other, link = (tmp_path / name for name in ("one", "other", "link"))
    one.write_text("a")
    other.write_text("a")
    os.utime(other, ns=(1, 1))
    link.symlink_to(one)
    first = fingerprint(link)
    assert first == fingerprint(str(one)) != fingerprint(other)
    link.unlink()
    link.symlink_to("one")
    assert fingerprint(link) == first
    one.write_text("longer")
    assert fingerprint(link) != first
    link.unlink()
    link.symlink_to(other)
    assert fingerprint(link) == fingerprint(other)
    other.unlink()
    assert fingerprint(link) == ()
