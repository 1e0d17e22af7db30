"""The pool of blocks: no operation leaks one, none is in two states, none is used after it was given away."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, BlockState

_NUM_BLOCKS = 9


class _Pool(RuleBasedStateMachine):
    """Holders, leases and quarantined blocks by simple bookkeeping, against the pool's own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(_NUM_BLOCKS)
        self.holders: list[tuple[int, ...]] = []
        self.leased: set[int] = set()
        self.quarantined: set[int] = set()

    @rule(num_blocks=st.integers(0, 5))
    def reserve(self, num_blocks: int) -> None:
        num_free = self.pool.num_free
        block_ids = self.pool.reserve(num_blocks)
        if block_ids is None:
            assert num_blocks > num_free == self.pool.num_free
            return
        assert len(set(block_ids)) == num_blocks
        assert not set(block_ids) & (self.leased | self.quarantined | {b for h in self.holders for b in h})
        self.holders.append(block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.holders))
        self.pool.share(block_ids)
        self.holders.append(block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block_ids = [b for b in data.draw(st.sampled_from(self.holders)) if b not in self.leased]
        self.pool.lease(block_ids)
        self.leased.update(block_ids)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.leased)))
        self.pool.end_lease((block_id,))
        self.leased.remove(block_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.holders) - 1))
        others = {b for i, holder in enumerate(self.holders) if i != place for b in holder} | self.leased
        block_ids = [b for b in self.holders[place] if b not in others]
        self.pool.quarantine(block_ids)
        self.quarantined.update(block_ids)
        self.holders[place] = tuple(b for b in self.holders[place] if b not in block_ids)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine({self.quarantined.pop()})

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        self.pool.check()
        held = {b for holder in self.holders for b in holder} - self.leased
        assert self.pool.counts() == {
            "quarantined": len(self.quarantined),
            "leased": len(self.leased),
            "held": len(held),
            "cached": 0,
            "free": _NUM_BLOCKS - len(held) - len(self.leased) - len(self.quarantined),
        }

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder)
        self.pool.end_lease(sorted(self.leased))
        self.pool.end_quarantine(self.quarantined)
        self.pool.check()
        assert self.pool.num_free == _NUM_BLOCKS


TestTenThousandOperationsLeakNoBlock = _Pool.TestCase
TestTenThousandOperationsLeakNoBlock.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)


def test_a_reservation_is_all_or_nothing() -> None:
    pool = BlockPool(3)

    assert pool.reserve(4) is None
    assert pool.num_free == 3
    assert len(pool.reserve(3) or ()) == 3


def test_a_leased_block_is_not_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    block_ids = pool.reserve(1)
    assert block_ids is not None
    pool.lease(block_ids)
    pool.release(block_ids)

    assert pool.state(block_ids[0]) is BlockState.LEASED
    assert pool.reserve(1) is None
    pool.end_lease(block_ids)
    assert pool.reserve(1) == block_ids


@pytest.mark.parametrize("operation", ["release", "share", "lease", "end_lease", "quarantine", "end_quarantine"])
def test_an_illegal_operation_raises_with_the_blocks_story(operation: str) -> None:
    pool = BlockPool(2)
    block_ids = pool.reserve(1)
    assert block_ids is not None
    pool.release(block_ids)

    with pytest.raises(
        AssertionError, match=rf"illegal {operation} of block 0 \(free, 0 references\).*reserve release"
    ):
        getattr(pool, operation)(block_ids)


def test_a_shared_or_leased_block_cannot_be_quarantined() -> None:
    pool = BlockPool(2)
    shared, leased = pool.reserve(1), pool.reserve(1)
    assert shared is not None and leased is not None
    pool.share(shared)
    pool.lease(leased)

    for block_ids in (shared, leased):
        with pytest.raises(AssertionError, match="illegal quarantine"):
            pool.quarantine(block_ids)


def test_check_finds_a_block_that_is_free_and_in_use() -> None:
    pool = BlockPool(3)
    block_ids = pool.reserve(2)
    assert block_ids is not None
    pool._free.append(block_ids[1])

    with pytest.raises(AssertionError, match="sum to"):
        pool.check()
    pool._free.remove(2)
    with pytest.raises(AssertionError, match=r"free and in use: block 1 \(held, 1 references\): ...reserve"):
        pool.check()
