"""Masses found through rows of slots equal those of keys laid out by hand."""

import pytest
import torch

from vtoken.gpu_scores.mass import ObservedQueries, choose_scorer, mass_by_index
from vtoken.kv_pages import PagedKV
from vtoken.scores import attention_mass

HEADS, KV_HEADS, DIM, LENS = 6, 2, 8, (3, 7)


@pytest.mark.parametrize("page", [1, 4])
def test_mass_by_index_gathers_the_rows_keys(page):
    """Blocks of one token and of more; NaN in dead tokens and behind the rows' ends is not read."""
    cache = torch.full((32 // page, KV_HEADS, page, 2 * DIM), float("nan"))
    paged = PagedKV.from_cache(cache)
    slots = torch.randperm(31)[: sum(LENS)].split(LENS)
    keys = torch.zeros(2, KV_HEADS, max(LENS), DIM)
    table = torch.full((5, 16), 31, dtype=torch.int32)
    rows = torch.tensor([4, 1])
    for i, part in enumerate(slots):
        content = torch.randn(len(part), KV_HEADS, 2 * DIM)
        cache[part // page, :, part % page] = content
        keys[i, :, : len(part)] = content[..., :DIM].transpose(0, 1)
        table[rows[i], : len(part)] = part.int()
    query = torch.randn(9, HEADS, DIM)
    places, lens = torch.tensor([[2, 3], [7, 8]]), torch.tensor([[2, 3], [6, 7]])
    observed = ObservedQueries(places, table, rows, lens, width=7)
    mass = mass_by_index(query, paged, observed, 0.3, 2.0)
    expected = attention_mass(query[places], keys, lens, scale=0.3, soft_cap=2.0)
    assert torch.equal(mass, expected)
    assert torch.isfinite(mass).all()


def test_without_cuda_torch_scores():
    """No Triton is imported for it."""
    assert choose_scorer(torch.device("cpu")) is mass_by_index
