"""Attention on GPUs: stock kernels that read one-token blocks, a table of live slots per request.

A backend that answers 1 when asked for its kernel block size makes vLLM split its blocks of 16
tokens into kernel blocks of one. The cache becomes token-major, a kernel block is a slot, and the
*kernel block table* of a request, which vLLM would fill with the blocks of all its positions,
lists its live slots in logical order instead; its length is the number of live tokens::

    vLLM's rows (logical)   block 7           block 3            seq_len 20
    live slots              112 113 119 127   48 50              live len 6

CUDA graphs read table and lengths at the addresses they were captured with: :class:`LiveTables`
owns both and is filled in place, before every forward, outside of the graph.

The classes here are mixed into vLLM's own backend, builder and implementation of each kernel:
:mod:`~vtoken.integration.vllm.attention_gpu_triton` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.attention_limits import LiveTokensOnly, check_layer
from vtoken.integration.vllm.attention_metadata import LiveRows
from vtoken.integration.vllm.compat.gpu_side import take_kernel_block_table, with_live_tokens


class LiveTables:
    """Slots and lengths of the batch that runs next, at addresses that never change.

    Attributes:
        table: int32 ``[max_num_reqs, width]``; a row is valid up to its length.
        lens: int32 ``[max_num_reqs]``; 0 behind the batch, where graphs are padded.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.lens = torch.zeros(len(table), dtype=torch.int32, device=table.device)
        self._lens_cpu: torch.Tensor | None = None

    def fill(self, live: LiveRows, lens_cpu: torch.Tensor) -> None:
        """Take the rows of the next batch: device work on the current stream, no host sync.

        Args:
            live: rows on the table's device; its slots are canonical.
            lens_cpu: ``live.lens`` as the host knows them, ``[num_reqs]``.
        """
        num_reqs, width = len(live.rows), int(lens_cpu.max())
        target = self.table[:num_reqs, :width]
        # What lies behind the end of a row is stale; kernels stop at its length.
        torch.index_select(live.table[:, :width], 0, live.rows, out=target)
        self.lens[:num_reqs].copy_(live.lens)
        self.lens[num_reqs:].zero_()
        self._lens_cpu = torch.zeros(len(self.table), dtype=torch.int32)
        self._lens_cpu[:num_reqs] = lens_cpu

    def view(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """``common`` reading these buffers; consumes what was filled in.

        Without a batch (dummy runs, graph capture) the lengths are those of ``common``, over
        whatever slots the rows hold: in range, and nobody uses the result.
        """
        num_reqs = common.num_reqs
        lens_cpu, self._lens_cpu = self._lens_cpu, None
        max_len = common.max_seq_len
        if lens_cpu is None:
            self.lens[:num_reqs].copy_(common.seq_lens[:num_reqs])
            lens_cpu = common.seq_lens_cpu_upper_bound
        else:
            max_len = int(lens_cpu.max())
        table, lens = self.table[:num_reqs], self.lens[:num_reqs]
        host = None if lens_cpu is None else lens_cpu[:num_reqs]
        return with_live_tokens(common, table, lens, host, max_len)


class QuerySink(Protocol):
    """Where sampled layers leave their queries; see :mod:`query_capture`."""

    def take(self, layer_name: str, query: torch.Tensor) -> None:
        """``query`` ``[num_tokens, num_heads, head_size]`` of this step, valid until it ends."""


class LiveBackend(LiveTokensOnly):
    """Mixed into a backend: reads one-token blocks of decoder layers, nothing else."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """The number 1, not a multiple of it: vLLM shall split its blocks."""
        return [1]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Any: the kernels never see it."""
        return True

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Whatever the caller prefers."""
        return default_block_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Where vLLM can split blocks into tokens; both are token-major afterwards."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_rswa(cls) -> bool:
        """No, as with windows."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No: ranges are positions."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """No: not proven."""
        return False


class LiveBuilder:
    """Mixed into a metadata builder: metadata of a batch over live tokens.

    Before :meth:`attach`, as in vLLM's memory profiling, batches are positional.
    """

    # A block table in place of another would be positional.
    supports_update_block_table: bool = False
    supports_draft_decode_metadata_update: bool = False

    _tables: LiveTables | None = None

    def attach(self, tables: LiveTables) -> None:
        """Read through ``tables`` from now on."""
        self._tables = tables

    def set_live_rows(
        self, live: LiveRows, observer: Any = None, lens_cpu: torch.Tensor | None = None
    ) -> None:
        """Rows of the next :meth:`build`, before its forward.

        Args:
            live: rows on the device, canonical slots.
            observer: unused: queries are captured, see :class:`LiveImpl`.
            lens_cpu: ``live.lens`` on the host; None takes them from ``live``, which on CUDA
                waits for the device.
        """
        assert self._tables is not None, "attach() comes first"
        self._tables.fill(live, live.lens.cpu() if lens_cpu is None else lens_cpu)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Metadata of one step; without rows (dummy runs) every position counts as live."""
        common = common_attn_metadata
        if self._tables is not None:
            common = self._tables.view(common)
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]


class LiveImpl:
    """Mixed into an implementation: refuses what rows cannot express, shows its queries.

    Attributes:
        query_sink: where to leave queries; None in layers that are not sampled.

    Raises:
        UnsupportedError: the layer needs what rows of live tokens cannot express.
    """

    query_sink: QuerySink | None = None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        check_layer(
            "GPUs",
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
            # vLLM passes some options on although they are off.
            further={
                f"the attention option {name}={value!r}": value not in (None, False, -1)
                for name, value in unknown.items()
            },
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            None,
            None,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
        )  # type: ignore[call-arg]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stock attention; sampled layers leave their queries behind."""
        result: torch.Tensor = super().forward(  # type: ignore[misc]
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        if self.query_sink is not None and attn_metadata is not None:
            self.query_sink.take(layer.layer_name, query)
        return result


def attach_tables(groups: Iterable[Any]) -> LiveTables:
    """Let the builders of the one attention group read through tables of ours.

    Call after vLLM created its groups and before it captures graphs.

    Raises:
        UnsupportedError: several groups, another backend, or no kernel blocks of one token.
    """
    found = list(groups)
    if len(found) != 1:
        raise UnsupportedError(f"{len(found)} attention groups, live tokens need 1")
    builders = found[0].metadata_builders
    strange = [builder for builder in builders if not isinstance(builder, LiveBuilder)]
    if strange:
        raise UnsupportedError(
            f"vToken cannot read live tokens through {type(strange[0]).__name__}"
        )
    tables = LiveTables(take_kernel_block_table(found[0]))
    for builder in builders:
        builder.attach(tables)
    return tables
