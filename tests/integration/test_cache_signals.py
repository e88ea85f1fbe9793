"""Signals of K and V, in parts: the same values, less memory, and V only where it is read."""

from __future__ import annotations

import pytest
import torch

from tests.integration.peak_memory import PeakMemory
from vtoken.integration.vllm import cache_signals as module
from vtoken.integration.vllm.cache_signals import NUMBER_BYTES, cache_signals
from vtoken.observation import CACHE_SIGNALS, KEY_NORM, KEY_REDUNDANCY, VALUE_KEY_RATIO
from vtoken.scores import key_norms, key_redundancy, value_key_ratio

HEADS, DIM, TOKENS = 2, 64, 3001
NUMBERS = HEADS * DIM


class Layer:
    """Keys and values by slot, and how many slots of each were gathered."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(4)
        shape = (2, HEADS, 2 * TOKENS, DIM)
        self.key, self.value = torch.randn(shape, generator=generator).to(dtype)
        self.slots = torch.randperm(2 * TOKENS, generator=generator)[:TOKENS]
        self.num_keys = self.num_values = 0

    def keys(self, slots: torch.Tensor) -> torch.Tensor:
        self.num_keys += len(slots)
        return self.key[:, slots]

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        self.num_values += len(slots)
        return self.value[:, slots]

    def signals(self, *names: str) -> dict[str, torch.Tensor]:
        """Of all tokens."""
        return cache_signals(names, self.slots, self.keys, self.values, NUMBERS)

    def expected(self) -> dict[str, torch.Tensor]:
        """Of all tokens at once."""
        key, value = self.key[:, self.slots], self.value[:, self.slots]
        return {
            KEY_NORM: key_norms(key),
            KEY_REDUNDANCY: key_redundancy(key),
            VALUE_KEY_RATIO: value_key_ratio(key, value),
        }


def limit_to(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> int:
    """Parts of so many tokens; what one may take."""
    limit = num_tokens * NUMBERS * NUMBER_BYTES
    monkeypatch.setattr(module, "WORK_BYTES", limit)
    return limit


def test_what_fits_at_once_has_the_same_bits():
    """Each key is read once."""
    layer = Layer()
    found = layer.signals(*CACHE_SIGNALS)
    assert found.keys() == CACHE_SIGNALS
    for name, values in layer.expected().items():
        assert torch.equal(found[name], values)
    assert layer.num_keys == layer.num_values == TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1000, 700, 1])
def test_parts_give_the_same_values(monkeypatch, dtype, num_tokens):
    """The redundancy is a mean over all keys, those of other parts included."""
    layer = Layer(dtype)
    limit_to(monkeypatch, num_tokens)
    found = layer.signals(*CACHE_SIGNALS)
    for name, values in layer.expected().items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "keys", "values"), [(KEY_NORM, 1, 0), (KEY_REDUNDANCY, 2, 0), (VALUE_KEY_RATIO, 1, 1)]
)
def test_values_are_gathered_only_where_they_are_read(monkeypatch, name, keys, values):
    """A redundancy reads its keys twice if they are many."""
    layer = Layer()
    limit_to(monkeypatch, 1000)
    layer.signals(name)
    assert (layer.num_keys, layer.num_values) == (keys * TOKENS, values * TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CACHE_SIGNALS))
def test_a_part_takes_no_more_than_the_limit(monkeypatch, dtype, name):
    """However many tokens there are; beside it there are only numbers per token."""
    layer = Layer(dtype)
    limit = limit_to(monkeypatch, 300)
    with PeakMemory() as peak:
        layer.signals(name)
    per_token = 4 * TOKENS * torch.float32.itemsize
    assert limit / 4 < peak.num_bytes < limit + per_token
