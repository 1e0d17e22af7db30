"""What this router believes that workers hold of a prompt, as prefill workers are told it.

Owns the memory of what was sent where. A worker that is told wrong computes; nothing depends on a belief.
"""

import secrets
from collections.abc import Sequence

from cluster.hashing import NATIVE, BlockChain, NamelessChain, keyed_chains
from cluster.messages import MemberId, PrefixHolder
from router.fleet import Fleet
from router.prefix_memory import PrefixMemory

_MAX_HOLDERS = 3


class PrefixBeliefs:
    def __init__(self, fleet: Fleet, memory: PrefixMemory) -> None:
        self._key = secrets.token_bytes(32)  # its own: these hashes leave the router as little as prompts do
        self._fleet = fleet
        self._memory = memory

    def chain(self, worker: MemberId, token_ids: Sequence[int], salt: str) -> BlockChain:
        """Names of these tokens' blocks at this worker; none where KV is quantised on its way, for it is not pulled."""
        peer = self._fleet.peer(worker)
        member = peer.member if peer is not None else None
        if member is None or member.capacity is None or member.fingerprint is None:
            return NamelessChain()
        if member.fingerprint.wire_dtype != NATIVE:
            return NamelessChain()
        chain = keyed_chains(self._key, member.capacity.block_size)(salt, NATIVE)
        chain.extend(token_ids)
        return chain

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
        for worker, num_blocks in self._memory.holders(chain.hashes):
            peer = self._fleet.peer(worker)
            if peer is not None and worker in at_work and worker != besides and peer.pairing == asking.pairing:
                assert asking.member.capacity is not None
                num_tokens = num_blocks * asking.member.capacity.block_size
                holders.append(PrefixHolder(worker, peer.member.address, num_tokens))
        return tuple(holders[:_MAX_HOLDERS])
