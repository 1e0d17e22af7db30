"""What this router believes that workers hold of a prompt, as prefill workers are told it.

Owns the memory of what was sent where; beside it stands the index of what prefill workers say that they have. A worker
that is told wrong computes; nothing depends on a belief.
"""

from collections.abc import Sequence

from cluster.member import Member
from cluster.messages import MemberId, PrefixHolder
from cluster.protocol.hashing import NATIVE, BlockChain, NamelessChain, keyed_chains
from router.fleet.fleet import Fleet
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory

_MAX_HOLDERS = 3


class PrefixBeliefs:
    def __init__(self, fleet: Fleet, memory: PrefixMemory, index: PrefixIndex, key: bytes) -> None:
        """`key`: the cluster's, by which workers name blocks."""
        self._key = key
        self._fleet = fleet
        self._memory = memory
        self._index = index

    def cached_tokens(self, token_ids: Sequence[int], salt: str) -> dict[MemberId, int]:
        """Of each prefill worker that has a beginning of these tokens: how many of them. The last one is always
        computed."""
        members = [peer.member for load in self._fleet.prefill_loads() if (peer := self._fleet.peer(load.member))]
        if len(members) < 2:
            return {}
        chain, cached = self._chain(members[0], token_ids[:-1], salt), dict[MemberId, int]()
        lengths = self._lengths(chain)
        for member in members:
            if member.capacity is not None and member.id in lengths:
                cached[member.id] = lengths[member.id] * member.capacity.block_size
        return cached

    def chain(self, worker: MemberId, token_ids: Sequence[int], salt: str) -> BlockChain:
        """Names of these tokens' blocks at this worker; none where KV is quantised on its way, for it is not pulled."""
        peer = self._fleet.peer(worker)
        member = peer.member if peer is not None else None
        if member is None or member.capacity is None or member.fingerprint is None:
            return NamelessChain()
        if member.fingerprint.wire_dtype != NATIVE:
            return NamelessChain()
        return self._chain(member, token_ids, salt)

    def note(self, chain: BlockChain, worker: MemberId) -> None:
        """It computes, imports or has decoded all of this."""
        self._memory.remember(chain.hashes, worker)

    def holders(self, chain: BlockChain, *, besides: MemberId) -> tuple[PrefixHolder, ...]:
        """Those with whom `besides` can exchange KV, the longest first."""
        asking = self._fleet.peer(besides)
        if asking is None:
            return ()
        holders = []
        at_work = {load.member for load in (*self._fleet.prefill_loads(), *self._fleet.decode_loads())}
        for worker, num_blocks in sorted(self._lengths(chain).items(), key=lambda item: -item[1]):
            peer = self._fleet.peer(worker)
            if peer is not None and worker in at_work and worker != besides and peer.pairing == asking.pairing:
                assert asking.member.capacity is not None
                num_tokens = num_blocks * asking.member.capacity.block_size
                holders.append(PrefixHolder(worker, peer.member.address, num_tokens))
        return tuple(holders[:_MAX_HOLDERS])

    def _chain(self, member: Member, token_ids: Sequence[int], salt: str) -> BlockChain:
        if member.capacity is None:
            return NamelessChain()
        chain = keyed_chains(self._key, member.capacity.block_size)(salt, NATIVE)
        chain.extend(token_ids)
        return chain

    def _lengths(self, chain: BlockChain) -> dict[MemberId, int]:
        """Leading blocks of each worker: told, or believed because they were just sent there."""
        told = self._index.holders(chain.hashes)
        believed = dict(self._memory.holders(chain.hashes))
        return {worker: max(told.get(worker, 0), believed.get(worker, 0)) for worker in {**believed, **told}}
