"""The score kernel: against its torch twin on the device, and its time per layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.attention import make_decode
from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.report import Row
from vtoken.gpu_scores.mass import ObservedQueries, Scorer, mass_by_index
from vtoken.kv_pages import PagedKV

SECTION = "scores"
TOLERANCE = 1e-4


def check_scores(machine: Machine, scorer: Scorer) -> Iterator[Row]:
    """Mass of one observed query per request of a decode batch."""
    batch, device = make_decode(machine), machine.device
    num_reqs = len(batch.query)
    cache = PagedKV.from_cache(batch.scattered.transpose(1, 2))
    observed = ObservedQueries(
        places=torch.arange(num_reqs, device=device)[:, None],
        table=batch.slots,
        rows=torch.arange(num_reqs, device=device),
        lens=torch.full((num_reqs, 1), batch.num_live, device=device),
        width=batch.num_live,
    )
    mass = scorer(batch.query, cache, observed, batch.scale, 0.0)
    twin = mass_by_index(batch.query, cache, observed, batch.scale, 0.0)
    error = float((mass - twin).abs().max())
    again = scorer(batch.query, cache, observed, batch.scale, 0.0)
    yield Row(SECTION, "error against torch", error, ok=error < TOLERANCE)
    yield Row(
        SECTION,
        "equal bits when repeated",
        str(torch.equal(mass, again)),
        ok=torch.equal(mass, again),
    )
    taken = machine.median_seconds(lambda: scorer(batch.query, cache, observed, batch.scale, 0.0))
    label = f"one layer, {num_reqs} × {batch.num_live} tokens"
    yield Row(SECTION, label, taken * 1e6, "µs")
