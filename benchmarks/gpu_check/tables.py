"""Live tables on the device: addresses stay, a captured graph reads the rows of its replay."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.report import Row
from vtoken.integration.vllm.attention_gpu import LiveTables
from vtoken.integration.vllm.attention_metadata import LiveRows

SECTION = "tables"


def make_rows(machine: Machine, seed: int) -> tuple[LiveRows, torch.Tensor]:
    """Rows with random slots, and their lengths on the host."""
    sizes, generator = machine.sizes, torch.Generator().manual_seed(seed)
    shape = (2 * sizes.num_reqs, sizes.num_live)
    table = torch.randint(0, 2**30, shape, generator=generator, dtype=torch.int32)
    rows = torch.randperm(len(table), generator=generator)[: sizes.num_reqs]
    lens = torch.randint(1, sizes.num_live + 1, (sizes.num_reqs,), generator=generator)
    device = machine.device
    return LiveRows(table.to(device), rows.to(device), lens.to(device)), lens


def check_tables(machine: Machine) -> Iterator[Row]:
    """Filled rows hold the batch's slots; the time of a fill."""
    sizes = machine.sizes
    width = sizes.num_live + 16
    table = torch.zeros(sizes.num_reqs + 2, width, dtype=torch.int32, device=machine.device)
    tables = LiveTables(table)
    wrong = 0
    for seed in range(3):
        live, lens = make_rows(machine, seed)
        tables.fill(live, lens)
        for i, length in enumerate(lens.tolist()):
            wrong += not torch.equal(tables.table[i, :length], live.table[live.rows[i], :length])
        wrong += tables.lens.tolist() != [*lens.tolist(), 0, 0]
    wrong += tables.table.data_ptr() != table.data_ptr()
    yield Row(SECTION, "rows filled in place", wrong, "wrong", ok=not wrong)
    taken = machine.median_seconds(lambda: tables.fill(live, lens))
    yield Row(SECTION, f"fill {sizes.num_reqs} rows", taken * 1e6, "µs")


def check_graph(machine: Machine) -> Iterator[Row]:
    """CUDA only: a graph captured over one batch sums the lengths of the batch it replays."""
    table = torch.zeros(machine.sizes.num_reqs, machine.sizes.num_live, dtype=torch.int32)
    tables = LiveTables(table.to(machine.device))
    first, first_lens = make_rows(machine, 1)
    second, second_lens = make_rows(machine, 2)
    result = torch.zeros(2, dtype=torch.int64, device=machine.device)

    def forward() -> None:
        result[0] = tables.lens.sum()
        result[1] = tables.table[:, 0].sum()

    tables.fill(first, first_lens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    tables.fill(second, second_lens)
    graph.replay()
    expected = [int(second_lens.sum()), int(second.table[second.rows, 0].sum())]
    ok = result.tolist() == expected
    yield Row(SECTION, "a captured graph reads the replayed batch", "yes" if ok else "no", ok=ok)
