"""A cap of blocks per request against θ_F, with the same victims and budgets, without a model.

    python -m benchmarks.block_cap [--out FILE]

The loads and the simulation are those of :mod:`benchmarks.adaptive_threshold`; copies cost nothing
in it, and those that a forward would have to wait for are counted apart.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.adaptive_threshold import BLOCK_SIZE, LOADS, Load, Simulation


def configs(load: Load) -> dict[str, dict[str, Any]]:
    """θ_F low and by default, and caps of one, four and sixteen blocks more than the budget."""
    budget = load.budget_tokens // BLOCK_SIZE
    caps = {f"cap {budget + n}": {"max_blocks_per_request": budget + n} for n in (1, 4, 16)}
    return {"fixed 0.05": {"theta_f": 0.05}, "fixed 0.25": {"theta_f": 0.25}, **caps}


def main() -> None:
    """Run every configuration and print, or write, the figures."""
    parser = argparse.ArgumentParser(description="A cap of blocks against θ_F, without a model.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {
        name: {label: Simulation(settings, load).run() for label, settings in configs(load).items()}
        for name, load in LOADS.items()
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
