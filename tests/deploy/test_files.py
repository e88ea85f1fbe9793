"""What is delivered names no machine and no registry, and its documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.tools import ROOT

pytestmark = pytest.mark.k8s

DOCUMENTS = [ROOT / "docs" / "deploy.md", *sorted((ROOT / "docs" / "runbooks").glob("*.md"))]
TEXTS = [
    *DOCUMENTS,
    ROOT / "Dockerfile",
    ROOT / ".dockerignore",
    *(p for p in (ROOT / "deploy").rglob("*") if p.is_file() and "__pycache__" not in p.parts),
]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_registry_and_no_machine_path(path: Path) -> None:
    """Addresses are examples or namespaces only."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"//[\w.-]+/simple\b|--(extra-)?index-url[ =]\w+://", text)
    assert not re.search(r"(?<![\w.])/(work|root)/", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_to_files(path: Path) -> None:
    """Relative links exist."""
    for target in re.findall(r"\]\((?!\w+://)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_values_named_in_the_guide_exist() -> None:
    """Every `--set` and dotted value of docs/deploy.md is a value of the chart."""
    values = yaml.safe_load((ROOT / "deploy/helm/vtoken-serve/values.yaml").read_text())
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # `gpu` is a section, `gpu.md` a page
    sections = "|".join(n for n in values if isinstance(values[n], dict) and n != "tests")
    named = set(re.findall(rf"(?<![\w./-])((?:{sections})(?:\.\w+)+)", text))
    for name in sorted(named):
        place = values
        for part in name.split("."):
            assert isinstance(place, dict), name
            assert part in place, name
            place = place[part]
    assert len(named) > 20
