"""Named keys: where they come from, how they are renewed, and what a broken source does."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from service.auth_keys import (
    CHECK_INTERVAL_SECONDS,
    MAX_FILE_BYTES,
    KeyRing,
    KeySources,
    parse_lines,
)
from vtoken.errors import ConfigError


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float = CHECK_INTERVAL_SECONDS) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_ring(clock: Clock, **sources) -> KeyRing:
    return KeyRing(KeySources("admin", **sources), clock)


def replace_file(path: Path, text: str) -> None:
    """As editors and Kubernetes do it: another file takes the name."""
    other = path.with_name(path.name + ".new")
    other.write_text(text)
    other.replace(path)


def make_secret(folder: Path, **keys: str) -> None:
    """A folder as Kubernetes mounts a secret, and renews it: links through ``..data``."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for name, key in keys.items():
        (version / name).write_text(key)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.replace(folder / "..data")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in keys:
            entry.unlink()


@pytest.mark.parametrize(
    ("line", "name", "key"),
    [
        ("alice: s3cret", "alice", "s3cret"),
        ("  ci-bot.2:   two words ", "ci-bot.2", "two words"),
        ("bare", "admin-1", "bare"),
        ("user:password", "admin-1", "user:password"),  # a name needs the space
        (": odd", "admin-1", ": odd"),
        ("sp ace: k", "admin-1", "sp ace: k"),
        ("x" * 65 + ": k", "admin-1", "x" * 65 + ": k"),
    ],
)
def test_lines_have_a_name_or_get_one(line, name, key):
    """``name: key``; everything else is a key as it stands."""
    assert parse_lines(f"\n# comment\n{line}\n", "admin") == [(name, key)]


def test_bare_keys_are_numbered_by_place():
    """So that a name means the same key as long as the file is not reordered."""
    assert parse_lines("a\nbob: b\nc\n", "api") == [("api-1", "a"), ("bob", "b"), ("api-3", "c")]


def test_all_sources_count(clock, tmp_path):
    """Given keys, a file and a folder; one name may have several keys."""
    file, folder = tmp_path / "keys", tmp_path / "folder"
    file.write_text("alice: old\nalice: new\n")
    folder.mkdir()
    (folder / "carol").write_text("c\n")
    (folder / ".hidden").write_text("h")
    ring = make_ring(clock, given=(("admin", "g"),), file=file, folder=folder)
    assert [ring.name_of(k) for k in ("g", "old", "new", "c", "h", "", "C")] == [
        "admin",
        "alice",
        "alice",
        "carol",
        None,
        None,
        None,
    ]
    assert ring.names == ["admin", "alice", "carol"]


def test_file_is_read_again_when_it_changes(clock, tmp_path):
    """The new key works and the old one does not, without a restart, once a second has passed."""
    file = tmp_path / "keys"
    file.write_text("alice: one")
    ring = make_ring(clock, file=file)
    replace_file(file, "alice: two")
    assert ring.name_of("one") == "alice"  # not looked yet
    clock.passes()
    assert ring.name_of("one") is None
    assert ring.name_of("two") == "alice"


def test_file_is_not_read_again_without_change(clock, tmp_path, monkeypatch):
    """A look costs a stat, and that at most once a second."""
    file = tmp_path / "keys"
    file.write_text("k")
    ring = make_ring(clock, file=file)
    looks = []
    monkeypatch.setattr(KeySources, "read", lambda _: pytest.fail("read again"))
    monkeypatch.setattr(
        KeySources, "fingerprint", lambda s, real=KeySources.fingerprint: looks.append(1) or real(s)
    )
    for _ in range(50):
        ring.name_of("k")
        clock.passes(CHECK_INTERVAL_SECONDS / 10)
    assert 4 <= len(looks) <= 6


def test_same_size_and_time_is_noticed_by_inode(clock, tmp_path):
    """Rotation by a file that looks the same from outside."""
    file = tmp_path / "keys"
    file.write_text("aaa")
    os.utime(file, ns=(1, 1))
    ring = make_ring(clock, file=file)
    replace_file(file, "bbb")
    os.utime(file, ns=(1, 1))
    clock.passes()
    assert ring.name_of("bbb") == "admin-1"


def test_mounted_secret_is_followed(clock, tmp_path):
    """Kubernetes swaps one link: keys change, come and go together."""
    make_secret(tmp_path, alice="a1", bob="b1")
    ring = make_ring(clock, folder=tmp_path)
    assert ring.names == ["alice", "bob"]
    make_secret(tmp_path, alice="a2", carol="c1")
    clock.passes()
    assert [ring.name_of(k) for k in ("a1", "a2", "b1", "c1")] == [None, "alice", None, "carol"]


@pytest.mark.parametrize("content", [None, "", "# gone\n", b"\xff\xfe", "x" * (MAX_FILE_BYTES + 1)])
def test_broken_file_keeps_the_last_good_keys(clock, tmp_path, caplog, content):
    """One error is logged, nobody is locked out, and a repaired file is taken."""
    file = tmp_path / "keys"
    file.write_text("alice: one")
    ring = make_ring(clock, file=file)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            clock.passes()
            assert ring.name_of("one") == "alice"
    assert len(caplog.records) == 1
    assert "VTOKEN_ADMIN_KEY_FILE" in caplog.text
    replace_file(file, "alice: two")
    clock.passes()
    assert [ring.name_of(k) for k in ("one", "two")] == [None, "alice"]


def test_emptied_folder_keeps_the_last_good_keys(clock, tmp_path, caplog):
    """As a file; so does a key file with two lines, and one without."""
    key = tmp_path / "alice"
    key.write_text("one")
    ring = make_ring(clock, folder=tmp_path)
    for spoil in (lambda: key.write_text("a\nb"), lambda: key.write_text(""), key.unlink):
        spoil()
        clock.passes()
        assert ring.name_of("one") == "alice"
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 3


def test_log_names_keys_and_never_shows_them(clock, tmp_path, caplog):
    """A rotation is one line with the names."""
    file = tmp_path / "keys"
    file.write_text("alice: hush-one")
    sources = KeySources("admin", (("x", "hush-two"),), file)
    ring = KeyRing(sources, clock)
    file.write_text("bob: hush-three")
    clock.passes()
    with caplog.at_level(logging.INFO):
        ring.name_of("")
    assert "bob, x" in caplog.text
    assert "hush" not in caplog.text + repr(sources) + repr(vars(ring))


@pytest.mark.parametrize(
    ("files", "bound"),
    [
        ({}, "one file per key"),
        ({"a b": "k"}, "file names"),
        ({"alice": "a\nb"}, "one key each"),
        ({"alice": "  \n"}, "one key each"),
    ],
)
def test_useless_folder_is_refused_at_start(clock, tmp_path, files, bound):
    """A folder that was named but gives no key is a mistake, not a closed door."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="VTOKEN_ADMIN_KEYS_DIR") as caught:
        make_ring(clock, folder=tmp_path)
    assert bound in str(caught.value)


def test_missing_sources_are_refused_at_start(clock, tmp_path):
    """Each under its own name."""
    with pytest.raises(ConfigError, match="VTOKEN_ADMIN_KEY_FILE"):
        make_ring(clock, file=tmp_path / "no")
    with pytest.raises(ConfigError, match="VTOKEN_API_KEYS_DIR"):
        KeyRing(KeySources("api", folder=tmp_path / "no"), clock)


def test_no_source_is_an_empty_ring(clock):
    """Not one that knows the empty key."""
    ring = make_ring(clock)
    assert ring.is_empty
    assert ring.name_of("") is None
