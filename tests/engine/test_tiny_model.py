"""The tiny model is the same wherever and whenever it is made."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.engine.tiny_model import ensure_tiny_model


def test_tiny_model_is_deterministic(tmp_path: Path) -> None:
    """Two builds have the same bytes, and a second call builds nothing."""
    digests = []
    for name in ("a", "b"):
        weights = ensure_tiny_model(tmp_path / name) / "model.safetensors"
        before = weights.stat().st_mtime_ns
        assert ensure_tiny_model(tmp_path / name) == weights.parent
        assert weights.stat().st_mtime_ns == before
        digests.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [weights.parent.name]
