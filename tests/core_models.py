"""Models of what surrounds the token layer: a block pool that checks itself, and naive tables.

``ModelPool`` behaves like vLLM's pool (references, LRU free list, prefix cache, null block 0) and
asserts on every misuse. ``NaiveRequest`` keeps the same facts as a token table and its occupancy,
as plain dictionaries from which every number is counted again on demand.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.eviction import Victims
from vtoken.observation import ATTENTION_HISTORY, SIGNALS, RequestSignals
from vtoken.occupancy import BlockOccupancy
from vtoken.request_kv import RequestKV
from vtoken.request_options import NO_OPTIONS, RequestOptions
from vtoken.table_store import TableStore
from vtoken.token_layer import TokenLayer
from vtoken.token_table import TokenTable

BLOCK_SIZE = 4


class ModelPool:
    """A reference-counted block pool with prefix cache; implements ``BlockPoolPort``."""

    def __init__(self, num_blocks: int = 32, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.num_total_blocks = num_blocks
        self.caches_prefixes = True
        self.ref = [1] + [0] * num_blocks  # the null block is never free
        self.free_list = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.lists: dict[str, list[int]] = {}
        self.uncached: set[str] = set()
        self.block_of_hash: dict[Hashable, int] = {}
        self.hash_of_block: dict[int, Hashable] = {}

    # -- the port --------------------------------------------------------------------------

    def num_free_blocks(self) -> int:
        return len(self.free_list)

    def num_empty_blocks(self, limit: int) -> int:
        empty = itertools.takewhile(lambda block: block not in self.hash_of_block, self.free_list)
        return sum(1 for _ in itertools.islice(empty, limit))

    def cached(self, block_ids: np.ndarray) -> np.ndarray:
        return np.array([block in self.hash_of_block for block in block_ids.tolist()], bool)

    def allocate(self, num_blocks: int) -> np.ndarray:
        assert num_blocks <= len(self.free_list), f"{num_blocks} of {len(self.free_list)} blocks"
        taken = [block for block, _ in zip(self.free_list, range(num_blocks), strict=False)]
        for block in taken:
            del self.free_list[block]
            assert self.ref[block] == 0, f"free block {block} has {self.ref[block]} references"
            self.ref[block] = 1
            self._drop_hash(block)
        return np.array(taken, np.int32)

    def free(self, block_ids: Sequence[int]) -> None:
        empty: list[int] = []
        for block in block_ids:
            assert block != 0, "the null block was freed"
            assert self.ref[block] > 0, f"block {block} was freed twice"
            self.ref[block] -= 1
            if not self.ref[block]:
                self.free_list[block] = None
                empty.extend([block] * (block not in self.hash_of_block))
        for block in reversed(empty):  # taken first, as in vLLM
            self.free_list.move_to_end(block, last=False)

    def shared(self, block_ids: np.ndarray) -> np.ndarray:
        return np.array([self.ref[block] > 1 or block == 0 for block in block_ids.tolist()], bool)

    def references(self, block_ids: np.ndarray) -> np.ndarray:
        return np.array([self.ref[block] for block in block_ids.tolist()], np.int64)

    def new_blocks(self, req_id: str, start: int) -> np.ndarray:
        return np.array(self.lists[req_id][start:], np.int32)

    def replace(self, req_id: str, indices: Sequence[int], block_ids: Sequence[int]) -> None:
        blocks = self.lists[req_id]
        for index, block in zip(indices, block_ids, strict=True):
            assert index < len(blocks), f"place {index} of {len(blocks)}"
            blocks[index] = block

    def stop_caching(self, req_id: str) -> None:
        self.uncached.add(req_id)

    # -- what the scheduler around it does -------------------------------------------------

    def start_request(self, req_id: str, hashes: Iterable[Hashable] = ()) -> int:
        """Make the block list of a request, with the cached blocks of its prefix; their number."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self.block_of_hash.get(block_hash)
            if block is None:
                break
            self.touch(block)
            blocks.append(block)
        assert req_id not in self.lists, f"request {req_id} has blocks already"
        self.lists[req_id] = blocks
        return len(blocks)

    def touch(self, block: int) -> None:
        """Add a reference to a block that may be free."""
        self.free_list.pop(block, None)
        self.ref[block] += 1

    def grow(self, req_id: str, num_tokens: int) -> bool:
        """Allocate until the request's list covers ``num_tokens``; False if there is no room."""
        blocks = self.lists[req_id]
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing > len(self.free_list):
            return False
        if missing > 0:
            blocks.extend(self.allocate(missing).tolist())
        return True

    def cache_full_blocks(self, req_id: str, hashes: Iterable[Hashable]) -> None:
        """Publish the first blocks of a request under their hashes, unless it has stopped."""
        if req_id in self.uncached:
            return
        for block, block_hash in zip(self.lists[req_id], hashes, strict=False):
            if block_hash not in self.block_of_hash and block not in self.hash_of_block:
                self.block_of_hash[block_hash] = block
                self.hash_of_block[block] = block_hash

    def release(self, req_id: str) -> None:
        """The request is over: drop its references, last block first."""
        self.free([block for block in reversed(self.lists.pop(req_id)) if block])
        self.uncached.discard(req_id)

    def check_integrity(self, in_flight: Iterable[int] = ()) -> None:
        """References are exactly the holders (lists and destinations in flight); rest is free."""
        holders = Counter(in_flight)
        for blocks in self.lists.values():
            holders.update(blocks)
        del holders[0]
        for block in range(1, self.num_total_blocks + 1):
            ref = self.ref[block]
            assert ref == holders[block], f"block {block}: {ref} refs, {holders[block]} holders"
            assert (ref == 0) == (block in self.free_list), f"block {block}: {ref} refs, free?"
        assert len(holders) + len(self.free_list) == self.num_total_blocks

    def _drop_hash(self, block: int) -> None:
        block_hash = self.hash_of_block.pop(block, None)
        if block_hash is not None:
            del self.block_of_hash[block_hash]


@dataclass(eq=False)
class NaiveRequest:
    """Table, blocks and schedule of one request, the simple way.

    Attributes:
        slot: live token -> slot, ascending by token.
        key: content that each token ever computed must have.
        blocks: the block list, 0 for places that were given back.
        sources: places that a plan in flight will empty.
        dirty: the worker needs its row whole: it has none, or tokens moved.
        executed: tokens whose K/V the worker has written.
        row_tokens: what the worker's row holds, as of the last step sent.
        poisoned: its content was lost by a copy that failed after the commit.
        options: what the request itself asked for.
        num_prompt: length of its prompt.
        last_signals: what its last eviction went by, if tokens may go early.
        document: the policy document that it keeps; None: it follows the one in force.
    """

    block_size: int
    prefill_end: int
    next_due: int
    slot: dict[int, int] = field(default_factory=dict)
    key: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    sources: frozenset[int] = frozenset()
    num_evicted: int = 0
    dirty: bool = True
    executed: int = 0
    row_tokens: list[int] = field(default_factory=list)
    poisoned: bool = False
    options: RequestOptions = NO_OPTIONS
    num_prompt: int = 0
    last_signals: RequestSignals | None = None
    document: VTokenConfig | None = None

    def grow(self, blocks: list[int], keys: Iterable[int]) -> None:
        """New live tokens with these contents, where the block list puts them."""
        self.blocks.extend(blocks[len(self.blocks) :])
        for key in keys:
            token = len(self.key)
            place, offset = divmod(token, self.block_size)
            self.slot[token] = self.blocks[place] * self.block_size + offset
            self.key.append(key)

    def evict(self, victims: Iterable[int], num_computed: int) -> None:
        """Tokens die; closed places without live token go back, except sources in flight."""
        for token in victims:
            del self.slot[token]
            self.num_evicted += 1
        self._give_back(set(range(num_computed // self.block_size)) - self.sources)

    def dropped_columns(self) -> list[int]:
        """Columns of the worker's row whose tokens died."""
        return [i for i, token in enumerate(self.row_tokens) if token not in self.slot]

    def settle(self, sources: list[int], dst_blocks: list[int], moves: dict[int, int]) -> None:
        """A plan is over; ``moves`` (token -> slot) is empty if it was not committed."""
        if dst_blocks:
            for token, slot in moves.items():
                if token in self.slot:
                    self.slot[token] = slot
            padded = dst_blocks + [0] * (len(sources) - len(dst_blocks))
            for place, block in zip(sources, padded, strict=True):
                self.blocks[place] = block
            self.dirty = True
        self.sources = frozenset()
        self._give_back(set(sources))

    def live_per_block(self) -> Counter[int]:
        """Live tokens of every block that has any."""
        return Counter(slot // self.block_size for slot in self.slot.values())

    def num_held(self) -> int:
        """Blocks held."""
        return sum(block != 0 for block in self.blocks)

    def _give_back(self, places: set[int]) -> None:
        live = self.live_per_block()
        for place in places:
            if not live[self.blocks[place]]:
                self.blocks[place] = 0

    def check(self, kv: RequestKV) -> None:
        """The real table and occupancy say the same."""
        ids = kv.table.live_ids()
        assert ids.tolist() == list(self.slot)
        assert kv.table.slots_of(ids).tolist() == list(self.slot.values())
        assert (kv.table.num_tokens, kv.table.num_live) == (len(self.key), len(self.slot))
        assert kv.blocks.ids.tolist() == self.blocks
        live = self.live_per_block()
        assert kv.blocks.num_live.tolist() == [live[block] for block in self.blocks]
        assert kv.blocks.retained == self.num_held()
        assert kv.num_evicted == self.num_evicted == len(self.key) - len(self.slot)
        assert kv.next_evict_at == self.next_due
        assert (kv.plan is not None) == bool(self.sources)


class NaiveModel:
    """All tracked requests, with the totals counted from scratch."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[str, NaiveRequest] = {}

    def check(self, requests: dict[str, RequestKV], occupancy: BlockOccupancy) -> None:
        """The real state equals this one; F and the other totals equal Eq. (1) from scratch."""
        assert requests.keys() == self.requests.keys()
        for req_id, naive in self.requests.items():
            naive.check(requests[req_id])
        held = live = low = 0
        for naive in self.requests.values():
            held += naive.num_held()
            live += len(naive.slot)
            counts = naive.live_per_block()
            low += sum(b != 0 and 2 * counts[b] <= self.block_size for b in naive.blocks)
        assert occupancy.retained_blocks == held
        assert occupancy.live_tokens == live
        waste = 1 - live / (held * self.block_size) if held else 0.0
        assert abs(occupancy.waste_ratio - waste) < 1e-12
        assert abs(occupancy.low_utilization_block_ratio - (low / held if held else 0)) < 1e-12


# -- builders ------------------------------------------------------------------------------


def make_config(**fields: Any) -> VTokenConfig:
    """A small configuration in which everything is always due."""
    defaults: dict[str, Any] = {
        "budget_tokens": None if fields.get("keep_ratio") else 8,
        "sink_tokens": 1,
        "recent_tokens": 2,
        "evict_interval_tokens": 1,
        "theta_f": 0.0,
        "low_watermark_ratio": 1.0,
    }
    return VTokenConfig(**{**defaults, **fields})


def make_layer(pool: ModelPool | None = None, **fields: Any) -> tuple[TokenLayer, ModelPool]:
    """A token layer over a model pool."""
    pool = pool or ModelPool()
    return TokenLayer(make_config(**fields), pool), pool


def make_request(
    layer: TokenLayer, pool: ModelPool, req_id: str = "a", num_tokens: int = 16, **kwargs: Any
) -> RequestKV:
    """A tracked request with ``num_tokens`` computed tokens, due for eviction."""
    pool.start_request(req_id, kwargs.pop("hashes", ()))
    assert pool.grow(req_id, num_tokens)
    prefill_end = kwargs.pop("prefill_end", num_tokens)
    num_prompt = kwargs.pop("num_prompt_tokens", num_tokens)
    options = RequestOptions.parse(kwargs.pop("options", None))
    most = kwargs.pop("max_num_tokens", num_tokens)
    kv = layer.admit(req_id, num_prompt, prefill_end, 7, options, max_num_tokens=most)
    layer.schedule_tokens(kv, 0, num_tokens)
    return kv


def empty_table(block_size: int = BLOCK_SIZE) -> TokenTable:
    """A token table without tokens, in a store of its own."""
    store = TableStore(block_size)
    return TokenTable(store, store.add_row())


def evict_tokens(table: TokenTable, token_ids: np.ndarray) -> list[int]:
    """Tokens of one table die; the slots that they leave."""
    rows, counts = np.array([table._row]), np.array([len(token_ids)])
    return table._store.mark_dead(rows, counts, token_ids).tolist()


def fail_allocations(pool: ModelPool, *numbers: int) -> None:
    """From now on these of the pool's allocations, counted from 1, raise."""
    allocate, calls = pool.allocate, itertools.count(1)

    def flaky(num_blocks: int) -> np.ndarray:
        if next(calls) in numbers:
            raise MemoryError("injected fault")
        return allocate(num_blocks)

    pool.allocate = flaky  # type: ignore[method-assign]


def make_table(num_tokens: int, blocks: Sequence[int], block_size: int = BLOCK_SIZE) -> TokenTable:
    """A token table with ``num_tokens`` live tokens in ``blocks``."""
    table = empty_table(block_size)
    table.sync_new_tokens(np.array(blocks, np.int32), num_tokens)
    return table


def make_signals(
    token_ids: np.ndarray,
    names: Iterable[str] = sorted(SIGNALS),
    rng: np.random.Generator | None = None,
    num_observed: int = -1,
) -> RequestSignals:
    """Random signals for these tokens, all of them observed unless said otherwise."""
    rng = rng or np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for name in names:
        if name == ATTENTION_HISTORY:
            values[name] = rng.integers(0, 2**63, len(token_ids), np.uint64)
        else:
            values[name] = rng.random(len(token_ids)).astype(np.float32)
    return RequestSignals(token_ids, len(token_ids) if num_observed < 0 else num_observed, values)


def kill(layer: TokenLayer, kv: RequestKV, victims: Sequence[int], num_computed: int = -1) -> None:
    """Evict chosen tokens, whatever the policy says, as the evictor does it."""
    end = kv.num_tokens if num_computed < 0 else num_computed
    ids = np.array(victims)
    columns = kv.table.live_ids().searchsorted(ids)
    layer.evictor.evict([Victims(kv, end, layer.evictor.policy, ids, columns)])
