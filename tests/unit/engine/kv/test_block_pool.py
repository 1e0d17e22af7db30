"""The pool of blocks: no operation leaks a block, no block is in two states, no released block is used."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.block_pool import BlockPool, BlockState
from tests.examples import num_examples

_NUM_BLOCKS = 9
_ROOT = b"root"


def _hashes(tokens: list[int]) -> list[bytes]:
    """The hashes of blocks of one token each."""
    return [_ROOT + bytes(tokens[: end + 1]) for end in range(len(tokens))]


class _Pool(RuleBasedStateMachine):
    """Holders, leases, contents and quarantined blocks by simple bookkeeping, against the pool's own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(_NUM_BLOCKS)
        self.holders: list[tuple[int, ...]] = []
        self.leases: list[tuple[int, ...]] = []
        self.quarantined: set[int] = set()
        self.contents: dict[int, bytes] = {}  # the content of each block until it is reserved again

    @rule(num_blocks=st.integers(0, 5))
    def reserve(self, num_blocks: int) -> None:
        num_available = self.pool.num_available
        block_ids = self.pool.reserve(num_blocks)
        if block_ids is None:
            assert num_blocks > num_available == self.pool.num_available
            return
        assert num_blocks <= num_available
        self.hold_anew(block_ids)
        self.holders.append(block_ids)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def compute(self, tokens: list[int]) -> None:
        """Treat a prompt as a scheduler does: reuse cached blocks, compute the others, keep all."""
        hashes = _hashes(tokens)
        found = self.pool.find(hashes)
        assert [self.contents[block_id] for block_id in found] == hashes[: len(found)]
        assert not set(found) & self.quarantined
        num_missing = len(tokens) - len(found)
        if self.pool.num_available_beside(found) < num_missing:
            return
        self.pool.add_references(found)
        fresh = self.pool.reserve(num_missing)
        assert fresh is not None and not set(fresh) & set(found)
        self.hold_anew(fresh)
        self.contents |= dict(zip(fresh, hashes[len(found) :], strict=True))
        self.pool.keep(found + fresh, hashes, _ROOT)
        assert len(self.pool.find(hashes)) == len(hashes)
        self.holders.append(found + fresh)

    def hold_anew(self, block_ids: tuple[int, ...]) -> None:
        assert len(set(block_ids)) == len(block_ids)
        assert not set(block_ids) & (self.leased | self.quarantined | self.held), "a block in use was given away"
        for block_id in block_ids:
            self.contents.pop(block_id, None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.holders))
        self.pool.add_references(block_ids)
        self.holders.append(block_ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.drop_references(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.holders))
        self.pool.begin_lease(block_ids)
        self.leases.append(block_ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.pool.end_lease(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.holders) - 1))
        others = {b for i, holder in enumerate(self.holders) if i != place for b in holder} | self.leased
        block_ids = [b for b in self.holders[place] if b not in others and b not in self.contents]
        self.pool.quarantine(block_ids, 1)
        self.quarantined.update(block_ids)
        self.holders[place] = tuple(b for b in self.holders[place] if b not in block_ids)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine({self.quarantined.pop()})

    @property
    def held(self) -> set[int]:
        return {b for holder in self.holders for b in holder}

    @property
    def leased(self) -> set[int]:
        return {b for lease in self.leases for b in lease}

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert (counts["quarantined"], counts["leased"]) == (len(self.quarantined), len(self.leased))
        assert counts["held"] == len(self.held - self.leased)
        assert counts["cached"] <= len(self.contents.keys() - self.held - self.leased)

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.drop_references(holder)
        for lease in self.leases:
            self.pool.end_lease(lease)
        self.pool.end_quarantine(self.quarantined)
        self.pool.check()
        assert self.pool.num_available == _NUM_BLOCKS


TestAnyOperationsLeakNoBlock = _Pool.TestCase
TestAnyOperationsLeakNoBlock.settings = settings(
    max_examples=num_examples(suite=33, search=100), stateful_step_count=100
)


def test_a_reservation_gets_all_its_blocks_or_no_block() -> None:
    pool = BlockPool(3)

    assert pool.reserve(4) is None
    assert pool.num_free == 3
    assert len(pool.reserve(3) or ()) == 3


def test_a_block_is_leased_until_the_last_of_its_leases_ends() -> None:
    pool = BlockPool(2)
    block_ids = pool.reserve(1)
    assert block_ids is not None
    for _ in range(2):
        pool.begin_lease(block_ids)
    pool.drop_references(block_ids)

    pool.end_lease(block_ids)
    assert pool.state(block_ids[0]) is BlockState.LEASED
    pool.end_lease(block_ids)
    assert pool.state(block_ids[0]) is BlockState.FREE


def test_cached_blocks_are_found_until_no_other_block_is_left_to_reserve() -> None:
    pool = BlockPool(3)
    block_ids = pool.reserve(2)
    assert block_ids is not None
    pool.keep(block_ids, [b"a", b"b"], _ROOT)
    assert pool.find([b"a", b"b", b"c"]) == block_ids
    pool.drop_references(block_ids)

    assert pool.counts()["cached"] == 2 and pool.find([b"a", b"x"]) == block_ids[:1]
    first = pool.reserve(1)
    assert first is not None and pool.find([b"a", b"b"]) == block_ids
    assert pool.reserve(1) == block_ids[1:]  # the continuation goes before what it continues
    assert pool.find([b"a", b"b"]) == block_ids[:1]
    assert pool.num_evicted == 1


def test_found_blocks_do_not_count_as_available_beside_themselves() -> None:
    pool = BlockPool(3)
    block_ids = pool.reserve(2)
    assert block_ids is not None
    pool.keep(block_ids, [b"a", b"b"], _ROOT)
    pool.drop_references(block_ids)

    assert (pool.num_available, pool.num_available_beside(block_ids)) == (3, 1)
    pool.add_references(block_ids)
    assert pool.num_available == pool.num_available_beside(block_ids) == 1
    assert pool.reserve(2) is None


def test_the_first_of_two_blocks_with_equal_content_is_kept() -> None:
    pool = BlockPool(2)
    first, second = pool.reserve(1), pool.reserve(1)
    assert first is not None and second is not None
    pool.keep(first, [b"a"], _ROOT)
    pool.keep(second, [b"a"], _ROOT)
    pool.drop_references(first + second)

    assert pool.find([b"a"]) == first
    assert pool.counts() == {"quarantined": 0, "leased": 0, "held": 0, "cached": 1, "free": 1}


def test_a_leased_block_is_not_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    block_ids = pool.reserve(1)
    assert block_ids is not None
    pool.begin_lease(block_ids)
    pool.drop_references(block_ids)

    assert pool.state(block_ids[0]) is BlockState.LEASED
    assert pool.reserve(1) is None
    pool.end_lease(block_ids)
    assert pool.reserve(1) == block_ids


@pytest.mark.parametrize(
    "operation", ["drop_references", "add_references", "begin_lease", "end_lease", "quarantine", "end_quarantine"]
)
def test_an_illegal_operation_raises_with_the_history_of_the_block(operation: str) -> None:
    pool = BlockPool(2)
    block_ids = pool.reserve(1)
    assert block_ids is not None
    pool.drop_references(block_ids)

    more = (1,) if operation == "quarantine" else ()
    with pytest.raises(
        AssertionError, match=rf"illegal {operation} of block 0 \(free, 0 references\).*reserve drop_references"
    ):
        getattr(pool, operation)(block_ids, *more)


def test_a_shared_or_leased_block_cannot_be_quarantined() -> None:
    pool = BlockPool(2)
    shared, leased = pool.reserve(1), pool.reserve(1)
    assert shared is not None and leased is not None
    pool.add_references(shared)
    pool.begin_lease(leased)

    for block_ids in (shared, leased):
        with pytest.raises(AssertionError, match="illegal quarantine"):
            pool.quarantine(block_ids, 1)


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
