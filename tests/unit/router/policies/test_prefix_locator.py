"""The prefix locator names workers that hold a prefix, for pulls and for placement."""

from dataclasses import dataclass, field, replace

import pytest

from cluster.member import Capacity, Member
from cluster.messages import CacheEvents, LayoutFingerprint, MemberId, PrefixSource, Role
from cluster.protocol.hashing import ID_BYTES, NATIVE, BlockChain, NamelessChain, keyed_chains, pack_ids
from router.fleet.prefix_locator import PrefixLocator, RequestChains
from router.policies.candidates import WorkerLoad
from router.policies.prefix_index import PrefixIndex

_LAYOUT = LayoutFingerprint(weights="w", model_config="c", dtype="float32", block_table="t")
_P0, _P1, _D0 = (MemberId(name, "1") for name in ("p0", "p1", "d0"))
_TOKENS = tuple(range(50))
_KEY = b"the cluster's"


@dataclass(frozen=True, slots=True)
class _Peer:
    member: Member
    kv_format: str


@dataclass
class _Fleet:
    """The part of the fleet that the locator uses."""

    peers: dict[MemberId, _Peer] = field(default_factory=dict)
    drained: set[MemberId] = field(default_factory=set)

    def add(self, member_id: MemberId, role: Role, layout: LayoutFingerprint = _LAYOUT) -> None:
        member = Member(
            id=member_id,
            role=role,
            address=f"{member_id.id}:1",
            model="m",
            fingerprint=layout,
            capacity=Capacity(num_blocks=9, block_size=16, max_num_seqs=4, max_model_len=99),
        )
        self.peers[member_id] = _Peer(member, repr(layout))

    def peer(self, member_id: MemberId) -> _Peer | None:
        return self.peers.get(member_id)

    def prefill_loads(self) -> list[WorkerLoad]:
        return self._loads(Role.PREFILL)

    def decode_loads(self) -> list[WorkerLoad]:
        return self._loads(Role.DECODE)

    def available(self) -> list[Member]:
        return [peer.member for peer in self.peers.values() if peer.member.id not in self.drained]

    def _loads(self, role: Role) -> list[WorkerLoad]:
        ready = [peer for peer in self.peers.values() if peer.member.role is role]
        return [WorkerLoad(peer.member.id, peer.kv_format, 0) for peer in ready if peer.member.id not in self.drained]


def _locator(index: PrefixIndex | None = None) -> tuple[_Fleet, PrefixLocator]:
    index = PrefixIndex() if index is None else index
    fleet = _Fleet()
    for member_id, role in ((_P0, Role.PREFILL), (_P1, Role.PREFILL), (_D0, Role.DECODE)):
        fleet.add(member_id, role)
    locator = PrefixLocator(fleet, index, _KEY)  # type: ignore[arg-type]  # a stand-in
    return fleet, locator


def _chain(locator: PrefixLocator, worker: MemberId, tokens: tuple[int, ...] = _TOKENS, salt: str = "") -> BlockChain:
    packed = pack_ids(tokens)
    return locator.chain(worker, packed, RequestChains(packed, salt))


def _sources(
    locator: PrefixLocator, puller: MemberId, tokens: tuple[int, ...] = _TOKENS, salt: str = ""
) -> tuple[PrefixSource, ...]:
    return locator.sources(locator.leading_blocks(_chain(locator, puller, tokens, salt)), puller=puller)


def _cached(locator: PrefixLocator, tokens: tuple[int, ...] = _TOKENS, salt: str = "") -> dict[MemberId, int]:
    packed = pack_ids(tokens)
    return locator.cached_tokens(packed, RequestChains(packed, salt))


def test_sources_are_workers_of_both_pools_except_the_puller() -> None:
    _, locator = _locator()
    locator.note_routed(_chain(locator, _P0, _TOKENS[:20], "salt"), _P0)
    locator.note_routed(_chain(locator, _D0, salt="salt"), _D0)
    longer = (*_TOKENS, 7, 7, 7)

    both = PrefixSource(_D0, "d0:1", 48), PrefixSource(_P0, "p0:1", 16)
    assert _sources(locator, _P1, longer, "salt") == both
    assert [source.member for source in _sources(locator, _P0, longer, "salt")] == [_D0]


def test_a_different_salt_or_beginning_has_no_source() -> None:
    _, locator = _locator()
    locator.note_routed(_chain(locator, _P0, salt="a"), _P0)

    assert _sources(locator, _P1, salt="b") == ()
    assert _sources(locator, _P1, (9, *_TOKENS), "a") == ()


def test_lost_draining_and_incompatible_workers_are_no_sources() -> None:
    fleet, locator = _locator()
    locator.note_routed(_chain(locator, _P0), _P0, _D0)
    num_blocks = locator.leading_blocks(_chain(locator, _P1))

    fleet.drained.add(_P0)
    assert [source.member for source in locator.sources(num_blocks, puller=_P1)] == [_D0]
    fleet.add(_D0, Role.DECODE, replace(_LAYOUT, weights="others"))
    assert locator.sources(num_blocks, puller=_P1) == ()
    del fleet.peers[_D0], fleet.peers[_P1]
    assert locator.sources(num_blocks, puller=_P1) == ()


def test_blocks_have_no_hashes_if_kv_is_transferred_quantised() -> None:
    fleet, locator = _locator()
    fleet.add(_P0, Role.PREFILL, replace(_LAYOUT, wire_dtype="int8"))

    assert isinstance(_chain(locator, _P0), NamelessChain)
    assert isinstance(_chain(locator, MemberId("gone", "1")), NamelessChain)


def _report(index: PrefixIndex, worker: MemberId, num_tokens: int, *, salt: str = "") -> None:
    chain = keyed_chains(_KEY, 16)(salt, NATIVE)
    chain.extend(_TOKENS[:num_tokens])
    assert index.apply(worker, CacheEvents(0, 9, tuple(chain.hashes), cleared=True), max_blocks=9)


def test_reported_and_routed_blocks_both_count_as_cached() -> None:
    index = PrefixIndex()
    _, locator = _locator(index)
    _report(index, _P0, 48)
    locator.note_routed(_chain(locator, _P1, _TOKENS[:16]), _P1)

    assert _cached(locator) == {_P0: 48, _P1: 16}
    assert _cached(locator, _TOKENS[:48]) == {_P0: 32, _P1: 16}  # the last token is computed
    assert _cached(locator, salt="another") == {}
    assert _sources(locator, _P1) == (PrefixSource(_P0, "p0:1", 48),)


def test_prompts_sent_to_a_decode_worker_count_too_and_a_single_worker_needs_no_look_up() -> None:
    index = PrefixIndex()
    fleet, locator = _locator(index)
    locator.note_routed(_chain(locator, _D0, _TOKENS[:32]), _D0)
    _report(index, _P0, 48)
    assert _cached(locator) == {_D0: 32, _P0: 48}
    num_blocks = locator.leading_blocks(_chain(locator, _D0))
    assert (locator.num_cached(num_blocks, _D0), locator.num_cached(num_blocks, _P1)) == (32, 0)
    fleet.drained |= {_P1, _D0}
    assert _cached(locator) == {}


@pytest.mark.parametrize("num_tokens", range(41))
def test_a_chain_of_a_request_is_that_of_its_tokens_however_many_it_has_by_now(num_tokens: int) -> None:
    packed = pack_ids(range(40))
    chains = RequestChains(packed[: 18 * ID_BYTES], "salt")
    expected = keyed_chains(b"key", 4)("salt", NATIVE)
    expected.extend(range(num_tokens))
    for _ in range(2):
        assert chains.chain(b"key", 4, packed[: num_tokens * ID_BYTES]).hashes == expected.hashes
