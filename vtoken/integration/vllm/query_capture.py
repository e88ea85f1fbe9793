"""Queries of the sampled layers, kept until the forward is over.

On GPUs a layer cannot compute scores in its forward: under CUDA graphs no Python runs there. It
leaves its queries in a buffer instead, at an address that a graph can capture, and one kernel per
sampled layer scores them afterwards, on the same stream and before any relocation is queued::

    forward N  ── q of layers 3, 11, 18, 26 ─▶ buffers ──▶ scores ──▶ forward event ─▶ copies
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch


class QueryCapture:
    """Where sampled layers leave their queries; implements :class:`attention_gpu.QuerySink`.

    Attributes:
        wanted: whether this step is observed. A graph that is being captured copies always, since
            the same graph serves observed steps and others.
    """

    def __init__(
        self,
        layer_names: Iterable[str],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Allocate the buffers: before graph memory is profiled.

        Args:
            layer_names: sampled layers.
            shape: most tokens of a step, query heads of this rank, head size.
            dtype: of the queries.
            device: of the model.
            is_capturing: whether a graph is being captured right now.
        """
        self.wanted = False
        self._is_capturing = is_capturing
        self._buffers = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name in layer_names
        }

    def take(self, layer_name: str, query: torch.Tensor) -> None:
        """Keep ``query`` ``[num_tokens, num_heads, head_size]``; other layers are ignored."""
        buffer = self._buffers.get(layer_name)
        if buffer is not None and (self.wanted or self._is_capturing()):
            buffer[: len(query)].copy_(query)

    @property
    def queries(self) -> Mapping[str, torch.Tensor]:
        """Buffer of each sampled layer; valid for this step's tokens if it was wanted."""
        return self._buffers

    def attach(self, layers: Mapping[str, object]) -> None:
        """Let the implementations of the sampled layers report here.

        Args:
            layers: attention layers of the model by name, each with an ``impl``.
        """
        for name in self._buffers:
            layers[name].impl.query_sink = self  # type: ignore[attr-defined]
