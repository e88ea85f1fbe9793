"""Writes the dashboards into the chart, from where Helm and people take them.

python -m deploy.grafana.build            # write
python -m deploy.grafana.build --check    # exit code 1 if a file is stale, missing or left over
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.grafana.fragmentation import FRAGMENTATION
from deploy.grafana.model import Dashboard
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.policy import POLICY
from deploy.grafana.relocation import RELOCATION

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, FRAGMENTATION, RELOCATION, POLICY)
FOLDER = Path(__file__).resolve().parents[1] / "helm" / "vtoken-serve" / "dashboards"


def files() -> dict[str, str]:
    """File name to content, of every dashboard."""
    return {
        f"{dashboard.uid}.json": json.dumps(dashboard.to_json(), indent=1, ensure_ascii=False)
        + "\n"
        for dashboard in DASHBOARDS
    }


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of files that differ from the code, are missing, or belong to no dashboard."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    wanted = files()
    return sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))


def _text(dashboard: Dashboard) -> str:
    return json.dumps(dashboard.to_json(), indent=1, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.build")
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(argv).check:
        names = stale()
        if names:
            print(f"stale: {', '.join(names)}; run python -m deploy.grafana.build", file=sys.stderr)
        return 1 if names else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale():
        if name in files():
            (FOLDER / name).write_text(files()[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
