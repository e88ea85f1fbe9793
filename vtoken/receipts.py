"""Receipts: what eviction did to the requests behind one answer, kept until it is fetched.

One answer may have several sequences (``n``, several prompts): they share a key, and their
numbers are added. The store is bounded; receipts that nobody fetched are dropped, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vtoken.request_kv import RequestKV

MAX_RECEIPTS = 1024


@dataclass(frozen=True)
class Receipt:
    """What became of one sequence since it was admitted, or computed anew after preemption.

    Attributes:
        policy: the one in force for it at last.
        policy_version: of the policy document that it followed at last.
        evicted_tokens: tokens that its answer's last tokens could not see any more.
        live_tokens: the others.
        freed_blocks: blocks that it let go before its end, net of destinations. Of these, the
            pool got back all that no other request shares.
        evictions, relocations: how often tokens were evicted, and a plan was committed.
        stall_seconds: how long forwards waited for copies of batches that it was part of.
    """

    policy: str
    policy_version: int
    evicted_tokens: int
    live_tokens: int
    freed_blocks: int
    evictions: int = 0
    relocations: int = 0
    stall_seconds: float = 0.0


class Receipts:
    """Receipts by key and request; the scheduler's thread calls it."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, dict[str, Receipt]] = OrderedDict()

    def add(self, kv: RequestKV, policy: str, policy_version: int, num_in_flight: int = 0) -> None:
        """Keep the request's numbers; those of an earlier life of it are replaced.

        Tokens in flight when it ended are not of its answer: they count as little as ones that
        were never scheduled.
        Without a key (``vtoken_receipt: true`` of an offline caller) nobody could fetch them.
        """
        key = kv.options.receipt
        if not isinstance(key, str):
            return
        num_tokens = kv.num_tokens - num_in_flight
        num_live = kv.num_live - kv.table.num_live_from(num_tokens)
        freed = kv.num_places - kv.num_retained
        receipt = Receipt(
            policy,
            policy_version,
            num_tokens - num_live,
            num_live,
            freed,
            kv.num_evictions,
            kv.num_relocations,
            kv.stall_seconds,
        )
        self._by_key.setdefault(key, {})[kv.req_id] = receipt
        self._by_key.move_to_end(key)
        if len(self._by_key) > MAX_RECEIPTS:
            self._by_key.popitem(last=False)

    def take(self, key: str) -> dict[str, Any]:
        """The sums over all sequences under ``key``, which are forgotten; zeros if unknown.

        ``work`` is for traces; clients do not see it.
        """
        found = list(self._by_key.pop(key, {}).values())
        return {
            "policy": found[-1].policy if found else None,
            "policy_version": found[-1].policy_version if found else None,
            "num_sequences": len(found),
            "evicted_tokens": sum(receipt.evicted_tokens for receipt in found),
            "live_tokens": sum(receipt.live_tokens for receipt in found),
            "freed_blocks": sum(receipt.freed_blocks for receipt in found),
            "work": {
                "evictions": sum(receipt.evictions for receipt in found),
                "relocations": sum(receipt.relocations for receipt in found),
                "stall_seconds": sum(receipt.stall_seconds for receipt in found),
            },
        }
