"""What a prefill worker is told about others: only whom it could ask, and only what is worth hashing."""

from dataclasses import dataclass, field, replace

from cluster.member import Capacity, Member
from cluster.messages import LayoutFingerprint, MemberId, PrefixHolder, PrefixNews, Role
from cluster.protocol.hashing import NATIVE, NamelessChain, keyed_chains
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.policies.placement import WorkerLoad
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory

_LAYOUT = LayoutFingerprint(weights="w", model_config="c", dtype="float32", block_table="t")
_P0, _P1, _D0 = (MemberId(name, "1") for name in ("p0", "p1", "d0"))
_TOKENS = tuple(range(50))
_KEY = b"the cluster's"


@dataclass(frozen=True, slots=True)
class _Peer:
    member: Member
    pairing: str


@dataclass
class _Fleet:
    """As far as beliefs look at it."""

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

    def _loads(self, role: Role) -> list[WorkerLoad]:
        ready = [peer for peer in self.peers.values() if peer.member.role is role]
        return [WorkerLoad(peer.member.id, peer.pairing, 0) for peer in ready if peer.member.id not in self.drained]


def _beliefs(index: PrefixIndex | None = None) -> tuple[_Fleet, PrefixBeliefs]:
    index = PrefixIndex() if index is None else index
    fleet = _Fleet()
    for member_id, role in ((_P0, Role.PREFILL), (_P1, Role.PREFILL), (_D0, Role.DECODE)):
        fleet.add(member_id, role)
    beliefs = PrefixBeliefs(fleet, PrefixMemory(), index, _KEY)  # type: ignore[arg-type]  # a stand-in
    return fleet, beliefs


def test_workers_of_both_pools_are_named_with_their_address_but_not_the_one_that_asks() -> None:
    _, beliefs = _beliefs()
    beliefs.note(beliefs.chain(_P0, _TOKENS[:20], "salt"), _P0)
    beliefs.note(beliefs.chain(_D0, _TOKENS, "salt"), _D0)
    chain = beliefs.chain(_P1, (*_TOKENS, 7, 7, 7), "salt")

    assert beliefs.holders(chain, besides=_P1) == (PrefixHolder(_D0, "d0:1", 48), PrefixHolder(_P0, "p0:1", 16))
    assert [holder.member for holder in beliefs.holders(chain, besides=_P0)] == [_D0]


def test_another_salt_or_another_beginning_names_nobody() -> None:
    _, beliefs = _beliefs()
    beliefs.note(beliefs.chain(_P0, _TOKENS, "a"), _P0)

    assert beliefs.holders(beliefs.chain(_P1, _TOKENS, "b"), besides=_P1) == ()
    assert beliefs.holders(beliefs.chain(_P1, (9, *_TOKENS), "a"), besides=_P1) == ()


def test_who_is_gone_drained_or_of_another_layout_is_not_named() -> None:
    fleet, beliefs = _beliefs()
    for worker in (_P0, _D0):
        beliefs.note(beliefs.chain(worker, _TOKENS, ""), worker)
    chain = beliefs.chain(_P1, _TOKENS, "")

    fleet.drained.add(_P0)
    assert [holder.member for holder in beliefs.holders(chain, besides=_P1)] == [_D0]
    fleet.add(_D0, Role.DECODE, replace(_LAYOUT, weights="others"))
    assert beliefs.holders(chain, besides=_P1) == ()
    del fleet.peers[_D0], fleet.peers[_P1]
    assert beliefs.holders(chain, besides=_P1) == ()


def test_where_kv_is_quantised_on_its_way_nothing_is_remembered() -> None:
    fleet, beliefs = _beliefs()
    fleet.add(_P0, Role.PREFILL, replace(_LAYOUT, wire_dtype="int8"))

    assert isinstance(beliefs.chain(_P0, _TOKENS, ""), NamelessChain)
    assert isinstance(beliefs.chain(MemberId("gone", "1"), _TOKENS, ""), NamelessChain)


def _told(index: PrefixIndex, worker: MemberId, num_tokens: int, *, salt: str = "") -> None:
    chain = keyed_chains(_KEY, 16)(salt, NATIVE)
    chain.extend(_TOKENS[:num_tokens])
    assert index.apply(worker, PrefixNews(0, 9, tuple(chain.hashes), is_snapshot=True), max_blocks=9)


def test_what_workers_say_that_they_have_counts_beside_what_was_sent_there() -> None:
    index = PrefixIndex()
    _, beliefs = _beliefs(index)
    _told(index, _P0, 48)
    beliefs.note(beliefs.chain(_P1, _TOKENS[:16], ""), _P1)

    assert beliefs.cached_tokens(_TOKENS, "") == {_P0: 48, _P1: 16}
    assert beliefs.cached_tokens(_TOKENS[:48], "") == {_P0: 32, _P1: 16}  # the last token is computed
    assert beliefs.cached_tokens(_TOKENS, "another") == {}
    assert beliefs.holders(beliefs.chain(_P1, _TOKENS, ""), besides=_P1) == (PrefixHolder(_P0, "p0:1", 48),)


def test_a_decode_worker_is_not_told_of_for_placement_and_one_prefill_worker_needs_no_choice() -> None:
    index = PrefixIndex()
    fleet, beliefs = _beliefs(index)
    beliefs.note(beliefs.chain(_D0, _TOKENS, ""), _D0)
    assert beliefs.cached_tokens(_TOKENS, "") == {}
    _told(index, _P0, 48)
    fleet.drained.add(_P1)
    assert beliefs.cached_tokens(_TOKENS, "") == {}
