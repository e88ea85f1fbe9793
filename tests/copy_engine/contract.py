"""What every copy engine must do; a test class per engine inherits :class:`CopyEngineContract`."""

import numpy as np
import pytest
import torch

from vtoken.copy_engine.base import CopyEngine
from vtoken.errors import CopyError
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV

BLOCKS, HEADS, SIZE, DIM = 12, 2, 4, 8
NUM_SLOTS = BLOCKS * SIZE


def make_pool(num_layers: int = 3, device: str = "cpu") -> KVPool:
    """A pool with random contents."""
    shape = (num_layers, BLOCKS, HEADS, SIZE, 2 * DIM)
    backing = torch.randn(shape, device=device).to(torch.bfloat16)
    return KVPool([SplitKV.from_cache(layer) for layer in backing])


def slots(*numbers: int) -> np.ndarray:
    """An array of slots."""
    return np.array(numbers, np.int32)


def digest(pool: KVPool, where: np.ndarray) -> str:
    """Digest of the tokens at ``where``."""
    return pool.digest(torch.from_numpy(where.astype(np.int64)))


class CopyEngineContract:
    """Inherit, and implement :meth:`make_engine`."""

    def make_engine(self, pool: KVPool) -> CopyEngine:
        """An engine over ``pool``."""
        raise NotImplementedError

    @pytest.fixture
    def pool(self):
        return make_pool()

    @pytest.fixture
    def engine(self, pool):
        engine = self.make_engine(pool)
        yield engine
        engine.close()

    def test_copies_are_complete_after_the_wait(self, pool, engine):
        """After the wait the destinations hold the sources' bytes."""
        src, dst = slots(1, 30, 7), slots(20, 21, 22)
        before = digest(pool, src)
        engine.submit(1, src, dst)
        engine.wait_before_read()
        assert digest(pool, dst) == before
        assert digest(pool, src) == before

    def test_results_come_once_with_their_numbers(self, pool, engine):
        """Each ticket is reported once, with bytes and times."""
        engine.submit(7, slots(1, 2), slots(20, 21))
        engine.wait_before_read()
        (result,) = engine.poll()
        assert (result.ticket, result.error) == (7, None)
        assert result.num_bytes == 2 * pool.bytes_per_token
        assert result.copy_seconds >= 0
        assert result.stall_seconds >= 0
        assert engine.poll() == ()

    def test_results_keep_the_order_of_submission(self, engine):
        """Several outstanding batches are reported in the order they were submitted."""
        for ticket in range(5):
            engine.submit(ticket, slots(ticket), slots(40 + ticket))
        engine.wait_before_read()
        assert [result.ticket for result in engine.poll()] == list(range(5))

    def test_later_batches_see_what_earlier_ones_wrote(self, pool, engine):
        """A chain of batches moves a token step by step."""
        before = digest(pool, slots(3))
        for ticket, (src, dst) in enumerate([(3, 10), (10, 25), (25, 47)]):
            engine.submit(ticket, slots(src), slots(dst))
        engine.wait_before_read()
        assert digest(pool, slots(47)) == before

    def test_nothing_is_reported_before_the_wait(self, engine):
        """What a step reports depends on waits, not on how fast a copy was."""
        engine.submit(1, slots(1), slots(20))
        assert engine.poll() == ()
        engine.wait_before_read()
        assert len(engine.poll()) == 1

    def test_waiting_without_batches_does_nothing(self, engine):
        """An idle engine neither blocks nor reports."""
        engine.wait_before_read()
        assert engine.poll() == ()

    def test_empty_batches_are_reported_too(self, engine):
        """A plan whose moves vanished still settles."""
        engine.submit(1, slots(), slots())
        engine.wait_before_read()
        assert engine.poll()[0].num_bytes == 0

    def test_arrays_may_be_reused_after_submit(self, pool, engine):
        """The engine owns its indices; the message buffer may be overwritten at once."""
        src, dst = slots(5), slots(44)
        before = digest(pool, src)
        engine.submit(1, src, dst)
        src[:], dst[:] = 0, 1
        engine.wait_before_read()
        assert digest(pool, slots(44)) == before

    @pytest.mark.parametrize(
        ("src", "dst", "message"),
        [
            ((1, 2), (20,), "2 sources but 1 destinations"),
            ((1, 2), (20, 2), "1 slots are source and destination at once, first 2"),
            ((1, 2), (20, 20), "2 destinations name only 1 distinct"),
            ((1, NUM_SLOTS), (20, 21), "source slots span 1..48, the pool has 0..47"),
            ((1, 2), (-1, 21), "destination slots span -1..21"),
        ],
        ids=["lengths", "overlap", "twice", "beyond the pool", "negative"],
    )
    def test_broken_moves_are_refused_with_numbers(self, pool, engine, src, dst, message):
        """A batch that some order of copying would get wrong never starts."""
        everything = np.arange(NUM_SLOTS, dtype=np.int32)
        before = digest(pool, everything)
        with pytest.raises(CopyError, match=message):
            engine.submit(1, slots(*src), slots(*dst))
        engine.wait_before_read()
        assert engine.poll() == ()
        assert digest(pool, everything) == before

    def test_close_finishes_and_may_be_repeated(self, pool, engine):
        """Outstanding copies are completed by close, which is idempotent."""
        before = digest(pool, slots(2))
        engine.submit(1, slots(2), slots(33))
        engine.close()
        engine.close()
        assert digest(pool, slots(33)) == before
