"""Counts the memory of tensors that are made and dropped: what a device would have to hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """While active, follows all tensors that operations make.

    Attributes:
        num_bytes: most that were alive at once, beside those that were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        # Views and operations in place return memory that they were given.
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: held for k, held in self._alive.items() if not held[0].expired()}
        self.num_bytes = max(self.num_bytes, sum(size for _, size in self._alive.values()))
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
