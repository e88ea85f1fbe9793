"""Signals of one layer that need nothing but K and V of live tokens, a bounded part at a time.

Values are gathered only for a signal that reads them. A mean over all keys (the redundancy) needs
them twice where they are more than one part: once for their sum, once to compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from vtoken.observation import KEY_NORM, KEY_REDUNDANCY, VALUE_KEY_RATIO
from vtoken.scores import key_norms, key_redundancy, unit_key_sum, value_key_ratio

WORK_BYTES = 128 * 2**20
"""Most bytes that one part takes: what is gathered, as float32 and what is made of it."""

NUMBER_BYTES = 12
"""That one number of a key takes meanwhile: gathered, as float32, and one result or the value."""

Gather: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""``slots`` (canonical, int64 ``[n]``) → ``[num_kv_heads, n, head_size]``."""


def cache_signals(
    names: Iterable[str],
    slots: torch.Tensor,
    keys: Gather,
    values: Gather,
    numbers_per_key: int,
) -> dict[str, torch.Tensor]:
    """Signals of the tokens in ``slots``: float32 ``[n]`` each.

    Args:
        names: members of :data:`vtoken.observation.CACHE_SIGNALS`.
        slots: all live tokens of a request, int64 ``[n]``.
        keys, values: of the layer.
        numbers_per_key: KV heads times head size.
    """
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    parts = slots.split(max(1, WORK_BYTES // (numbers_per_key * NUMBER_BYTES)))
    unit_sum = None
    if KEY_REDUNDANCY in found and len(parts) > 1:
        unit_sum = unit_key_sum(keys(parts[0]))
        for part in parts[1:]:
            unit_sum += unit_key_sum(keys(part))
    for part in parts:
        key = keys(part)
        for name, signals in found.items():
            if name == KEY_NORM:
                signals.append(key_norms(key))
            elif name == KEY_REDUNDANCY:
                signals.append(key_redundancy(key, unit_sum, len(slots)))
            else:
                assert name == VALUE_KEY_RATIO, name
                signals.append(value_key_ratio(key, values(part)))
        del key  # before the next part is gathered
    return {name: torch.cat(signals) for name, signals in found.items()}
