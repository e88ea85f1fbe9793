"""Policies of other packages join through an entry point; the documented example is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.core_models import make_config
from vtoken.errors import ConfigError
from vtoken.policies.base import LiveView
from vtoken.policies.registry import POLICIES, all_policies, catalogue, make_policy

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


def documented_example() -> tuple[str, str]:
    """The example's module and its entry point declaration, as the document prints them."""
    text = DOCS.read_text()
    code = re.search(r"```python\n# (\w+)\.py\n(.*?)```", text, re.S)
    point = re.search(r'\[project\.entry-points\."vtoken\.policies"\]\n(\w+) = "(.*?)"', text)
    assert code
    assert point
    assert point.group(2).split(":")[0] == code.group(1)
    return code.group(2), f"[vtoken.policies]\n{point.group(1)} = {point.group(2)}\n"


class Packages:
    """Makes packages with entry points importable for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, package: str, module: str, code: str, points: str) -> None:
        """As pip would leave it: a module and metadata beside it."""
        info = self._folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (self._folder / f"{module}.py").write_text(code)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """An empty place for packages; the registry looks again before and after."""
    monkeypatch.syspath_prepend(str(tmp_path))
    all_policies.cache_clear()
    before = set(sys.modules)
    yield Packages(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]
    all_policies.cache_clear()


def test_documented_example_is_complete_and_works(packages: Packages) -> None:
    """The text of docs/policies.md, nothing added: found, listed, made, and it evicts."""
    code, points = documented_example()
    assert len(code.strip().splitlines()) <= 25
    packages.install("my-policies", "my_policies", code, points)
    config = make_config(policy="every_other", policy_args={"stride": 3})
    policy = make_policy(config)
    view = LiveView(np.arange(12), 12, 6, 0)
    victims = policy.select_victims(view, 4, np.zeros(12, np.bool_))
    assert victims.tolist() == [0, 3, 6, 9]
    assert "every_other" in [row["name"] for row in catalogue()]


STUB = """
from vtoken.policies.streaming_llm import StreamingLLMPolicy
class Mine(StreamingLLMPolicy):
    name = "{name}"
    summary = "A stub."
"""


def test_duplicate_name_is_refused_with_both_sources(packages: Packages) -> None:
    """Which of two policies runs must not depend on the order of installation."""
    packages.install("one", "one", STUB.format(name="mine"), "[vtoken.policies]\nmine = one:Mine\n")
    packages.install("two", "two", STUB.format(name="mine"), "[vtoken.policies]\nmine = two:Mine\n")
    with pytest.raises(ConfigError, match=r"'mine' comes from both") as caught:
        make_policy(make_config(policy="h2o"))
    assert "one (one:Mine)" in str(caught.value)
    assert "two (two:Mine)" in str(caught.value)


def test_a_built_in_name_cannot_be_taken(packages: Packages) -> None:
    """The message names this package as the other source."""
    packages.install(
        "evil", "evil", STUB.format(name="h2o"), "[vtoken.policies]\nh2o = evil:Mine\n"
    )
    with pytest.raises(ConfigError, match=r"both vtoken-serve and evil \(evil:Mine\)"):
        make_policy(make_config(policy="random"))


@pytest.mark.parametrize(
    ("code", "points", "message"),
    [
        (STUB.format(name="mine"), "other = bad:Mine", "point 'other' leads to policy 'mine'"),
        (STUB.format(name="mine"), "mine = bad:Yours", "has no attribute 'Yours'"),
        ("Mine = 3", "mine = bad:Mine", "no subclass of EvictionPolicy"),
        ("import no_such_module", "mine = bad:Mine", "no_such_module"),
    ],
)
def test_unusable_policy_is_refused_with_the_reason(
    packages: Packages, code: str, points: str, message: str
) -> None:
    """Silence would be a configured policy that does nothing."""
    packages.install("bad", "bad", code, f"[vtoken.policies]\n{points}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        make_policy(make_config(policy="mine"))
    assert "bad (bad:" in str(caught.value)


def test_without_other_packages_there_are_ours(packages: Packages) -> None:
    """The registry adds nothing of its own accord."""
    assert all_policies() == POLICIES
