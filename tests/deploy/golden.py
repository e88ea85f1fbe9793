"""What the presets render to, kept in ``tests/deploy/golden`` and compared in the tests.

python -m tests.deploy.golden    # write them again after a change that is meant
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.deploy import tools
from tests.deploy.helm import PRESETS, Helm

FOLDER = Path(__file__).parent / "golden"


def golden_text(helm: Helm, preset: str) -> str:
    """The preset's objects as sorted YAML, so that helm 3 and helm 4 agree."""
    objects = helm.template({}, [preset])
    objects.sort(key=lambda o: (o["kind"], o["metadata"]["name"]))
    return yaml.safe_dump_all(objects, sort_keys=True, width=100)


def main() -> None:
    """Write every golden file."""
    FOLDER.mkdir(exist_ok=True)
    for preset in PRESETS:
        text = golden_text(Helm(tools.helm("helm4")), preset)
        (FOLDER / preset).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
