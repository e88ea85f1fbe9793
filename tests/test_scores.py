"""The arithmetic of signals against plain float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.scores import attention_mass, key_norms, key_redundancy, value_key_ratio

HEAD_SIZE = 16


def reference_mass(
    query: np.ndarray, key: np.ndarray, length: int, scale: float, soft_cap: float
) -> np.ndarray:
    """One query ``[H, D]`` over keys ``[Hkv, width, D]``, float64, head by head."""
    group = len(query) // len(key)
    mass = np.zeros(key.shape[1])
    for head, q in enumerate(query.astype(np.float64)):
        logits = key[head // group, :length].astype(np.float64) @ q * scale
        if soft_cap:
            logits = soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits - logits.max())
        mass[:length] += weights / weights.sum() / len(query)
    return mass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (6, 1)])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_attention_mass_equals_float64_reference(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, soft_cap: float
) -> None:
    """GQA, MHA and MQA, ragged lengths, several queries per request: error below 1e-5."""
    generator = torch.Generator().manual_seed(5)
    lens = torch.tensor([[3, 4, 5], [38, 39, 40], [1, 1, 1], [20, 30, 31]])
    query = torch.randn(4, 3, num_heads, HEAD_SIZE, generator=generator).to(dtype) * 2
    key = torch.randn(4, num_kv_heads, 40, HEAD_SIZE, generator=generator).to(dtype)
    mass = attention_mass(query, key, lens, scale=0.3, soft_cap=soft_cap)
    assert (mass.dtype, mass.shape) == (torch.float32, (4, 3, 40))
    q, k = query.float().numpy(), key.float().numpy()
    for i in range(4):
        for j in range(3):
            expected = reference_mass(q[i, j], k[i], int(lens[i, j]), 0.3, soft_cap)
            np.testing.assert_allclose(mass[i, j].numpy(), expected, atol=1e-5, rtol=1e-4)


def test_attention_mass_sums_to_one_and_stops_at_the_length() -> None:
    """Causality is exact: what a query may not read gets exactly nothing."""
    lens = torch.tensor([[2, 3], [7, 8]])
    mass = attention_mass(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 9, 8), lens, scale=1.0)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 2))
    assert not mass[torch.arange(9) >= lens[..., None]].any()


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_attention_mass_ignores_whatever_lies_behind_the_length(soft_cap: float) -> None:
    """Padding reads stale slots, which may hold NaN or infinity."""
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 2, 9, 8)
    lens = torch.tensor([[6]])
    clean = attention_mass(query, key, lens, scale=1.0, soft_cap=soft_cap)
    key[0, :, 6], key[0, :, 7] = float("nan"), float("inf")
    torch.testing.assert_close(
        attention_mass(query, key, lens, scale=1.0, soft_cap=soft_cap), clean, rtol=0, atol=0
    )


def test_attention_mass_does_not_depend_on_neighbours_or_padding() -> None:
    """A request scores the same alone as in a batch with a longer one."""
    query, key = torch.randn(2, 1, 6, 8), torch.randn(2, 3, 50, 8)
    together = attention_mass(query, key, torch.tensor([[12], [50]]), scale=0.5)
    alone = attention_mass(query[:1], key[:1, :, :12], torch.tensor([[12]]), scale=0.5)
    torch.testing.assert_close(together[0, 0, :12], alone[0, 0])


def test_key_signals_equal_float64_reference() -> None:
    """Norm, ratio and mean cosine with all others, mean over heads."""
    key, value = torch.randn(3, 25, 8), torch.randn(3, 25, 8)
    k, v = key.double().numpy(), value.double().numpy()
    norms = np.linalg.norm(k, axis=-1)
    np.testing.assert_allclose(key_norms(key), norms.mean(0), rtol=1e-5)
    ratio = (np.linalg.norm(v, axis=-1) / norms).mean(0)
    np.testing.assert_allclose(value_key_ratio(key, value), ratio, rtol=1e-5)
    unit = k / norms[..., None]
    cosine = unit @ unit.transpose(0, 2, 1)
    for matrix in cosine:
        np.fill_diagonal(matrix, 0.0)
    expected = cosine.sum(-1).mean(0) / 24
    np.testing.assert_allclose(key_redundancy(key), expected, atol=1e-6)


def test_key_redundancy_of_a_single_key_is_zero() -> None:
    """There is nothing to resemble."""
    assert abs(float(key_redundancy(torch.randn(2, 1, 8))[0])) < 1e-6
