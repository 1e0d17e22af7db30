"""A block that came from another worker without verification stays marked as unverified in every place of its
content, and so does every block that is computed from it.
"""

from cluster.messages import MemberId
from cluster.protocol.hashing import NATIVE, keyed_chains
from engine.kv.block_pool import BlockPool
from engine.scheduling import cache_commands, commands
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.scheduling.cache_commands import LeasePrefix as OfferFromDecode
from engine.scheduling.cache_commands import PrefixLeased as OfferedByDecode
from engine.scheduling.commands import Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policies import make_policy
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, StepResult
from tests.prefill_jobs import prefill_job
from tests.unit.engine.rigs.export_bench import limits
from tests.unit.engine.rigs.scheduler_bench import SchedulerBench

_BLOCK = 4
_TOKENS = tuple(range(1, 14))  # three full blocks, and one token


def test_a_pool_forgets_provenance_only_when_a_block_is_reserved_again() -> None:
    pool = BlockPool(2)
    first = pool.reserve(1)
    assert first is not None
    pool.mark_unverified(first)
    pool.keep(first, (b"h",), b"root")
    pool.drop_references(first)
    assert pool.find((b"h",)) == first and pool.unverified_among(first) == set(first), "cached, and still not verified"
    pool.add_references(first)
    pool.drop_references(first)
    again = pool.reserve(2)
    assert again is not None and pool.unverified_among(again) == frozenset()
    pool.check()


class _Prefill:
    """A prefill worker's scheduler with a pulled prefix of three blocks."""

    def __init__(self, unverified_places: tuple[int, ...]) -> None:
        chains = keyed_chains(b"key", _BLOCK)
        policy = make_policy("fcfs")
        self.scheduler = SequenceScheduler(
            SchedulerLimits(
                num_blocks=16,
                max_model_len=1 << 20,
                block_size=_BLOCK,
                max_prefill_tokens=64,
                max_num_seqs=8,
                max_queue=8,
            ),
            new_chain=chains,
            policy=policy,
        )
        chain = chains("", NATIVE)
        chain.extend(_TOKENS)
        self.hashes = tuple(chain.hashes)
        (reserved,) = self.scheduler.apply(cache_commands.ReservePull(1, self.hashes), 0.0)
        assert isinstance(reserved, cache_commands.PullReserved) and reserved.block_ids is not None
        self.block_ids = reserved.block_ids
        self.unverified = frozenset(self.block_ids[place] for place in unverified_places)
        self.scheduler.apply(cache_commands.AdmitPull(1, chain.parent_of(0), self.hashes, self.unverified), 0.0)


def test_a_prefix_ticket_names_its_unverified_blocks() -> None:
    prefill = _Prefill(unverified_places=(0, 2))
    (offered,) = prefill.scheduler.apply(LeasePrefix(b"t", prefill.hashes, 1), 0.0)
    assert offered == PrefixLeased(b"t", prefill.block_ids, prefill.unverified)


def test_an_unverified_prefix_of_a_prompt_is_handed_over_as_unverified() -> None:
    prefill = _Prefill(unverified_places=(1,))
    prefill.scheduler.apply(
        commands.AdmitExport(b"t", prefill_job(_TOKENS, max_tokens=4, importer=MemberId("d0", "1"))), 0.0
    )
    events, plan = prefill.scheduler.plan(0.0)
    (sealed,) = [event for event in events if isinstance(event, commands.Sealed)]
    assert plan is not None and sealed.block_ids == prefill.block_ids and sealed.unverified == prefill.unverified


def test_unverified_blocks_are_copied_to_the_tiers_with_their_provenance() -> None:
    prefill = _Prefill(unverified_places=(2,))
    (leased,) = prefill.scheduler.apply(cache_commands.LeaseForCopy(b"t", prefill.hashes, 0), 0.0)
    assert leased == cache_commands.LeasedForCopy(b"t", prefill.block_ids, prefill.unverified)
    prefill.scheduler.apply(Release(b"t"), 0.0)
    prefill.scheduler.check()


def test_blocks_computed_from_an_unverified_prefix_are_unverified() -> None:
    """Their digests show damage in transit, not the damage of the prefix from which they were computed. An importer
    that has the prefix itself reads these blocks alone."""
    for unverified_places in ((), (1,)):
        prefill, tokens = _Prefill(unverified_places), (*_TOKENS, *range(20, 25))
        prefill.scheduler.apply(
            commands.AdmitExport(b"t", prefill_job(tokens, max_tokens=4, importer=MemberId("d0", "1"))), 0.0
        )
        _, plan = prefill.scheduler.plan(0.0)
        assert plan is not None
        *_, computed, finished = prefill.scheduler.complete(plan, StepResult(((DrawnToken(7),),)), 0.0)
        assert isinstance(computed, commands.Sealed) and isinstance(finished, commands.ExportFinished)
        assert len(computed.block_ids) == 1 and set(computed.block_ids).isdisjoint(prefill.block_ids)
        assert computed.unverified == (frozenset(computed.block_ids) if unverified_places else frozenset())
        assert finished.tail is not None and finished.tail.is_unverified is bool(unverified_places)


def _imported(bench: SchedulerBench, *, is_verified: bool, num_output: int = 12) -> int:
    handoff = bench.reserve(bench.job(_TOKENS[:6], max_tokens=num_output))
    bench.finish(handoff, is_verified=is_verified)
    return handoff.job.sequences[0].handle


def test_a_migrated_sequence_keeps_its_unverified_blocks() -> None:
    for is_verified in (True, False):
        bench = SchedulerBench(limits(num_blocks=16))
        handle = _imported(bench, is_verified=is_verified)
        came = set(bench.sequence(handle).block_ids)
        for _ in range(4):
            bench.step()
        frozen = bench.freeze(handle)
        assert frozen is not None
        assert frozen.tail is not None and frozen.tail.is_unverified is not is_verified
        own = {*frozen.sealed_block_ids, frozen.tail.block_id}
        assert came < own, "it has computed a block from those that came"
        assert frozen.unverified == (set() if is_verified else own)
        bench.release(frozen.ticket_id)


def test_cached_blocks_keep_their_provenance() -> None:
    bench = SchedulerBench(limits(num_blocks=16))
    handle = _imported(bench, is_verified=False)
    sealed = bench.sequence(handle).block_ids[:1]
    bench.run()
    chain = bench.new_chain("", bench.wire_dtype)
    chain.extend(_TOKENS[:4])
    (offered, *_) = bench.scheduler.apply(OfferFromDecode(b"p", tuple(chain.hashes), 1), 0.0)
    assert offered == OfferedByDecode(b"p", sealed, frozenset(sealed))


def test_swapped_blocks_keep_their_provenance() -> None:
    bench = SchedulerBench(limits(num_blocks=6, num_swap_slots=8), prefix_caching=False)
    handles = [_imported(bench, is_verified=False) for _ in range(2)]
    while not (plan := bench.step()) or not plan.swaps_in:
        pass
    targets = {swap.block_id for swap in plan.swaps_in}
    pool = bench.scheduler._pool
    living = [bench.sequence(handle) for handle in handles if handle in bench.live]
    (back,) = [sequence for sequence in living if set(sequence.block_ids) & targets]
    assert set(back.block_ids[:2]) <= pool.unverified_among(back.block_ids), "its two imported blocks"
    assert set(back.block_ids) == pool.unverified_among(back.block_ids), "it computed the others from these"
