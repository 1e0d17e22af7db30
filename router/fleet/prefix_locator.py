"""Estimates which workers hold the beginning of a prompt, for placement and for pulls.

The prefix index (router/policies/prefix_index.py) decides; this module feeds it. `CacheEventFollower` subscribes to the
cache events of every worker. `PrefixLocator` names the blocks of a prompt and asks the index. A wrong estimate
costs a cache miss, never a wrong token: the worker computes what it does not find.
"""

import asyncio
import logging
from collections.abc import Mapping

import grpc

from cluster.errors import InvalidRequest, MalformedMessage
from cluster.member import Member
from cluster.messages import MemberId, PrefixSource
from cluster.protocol import report_wire
from cluster.protocol.hashing import ID_BYTES, NATIVE, BlockChain, NamelessChain, keyed_chains
from router.fleet.fleet import Fleet
from router.policies.prefix_index import PrefixIndex
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc

_LOG = logging.getLogger("tandem.router.prefixes")
_MAX_SOURCES = 3  # named in one prefill
_SUBSCRIPTION_S = 300.0  # the router then subscribes again, from the next event
_RETRY_PAUSE_S = 1.0


class CacheEventFollower:
    """Follows the cache events of workers, by one subscription each. While a subscription is broken the index keeps the
    reported blocks; it drops those of a lost worker.
    """

    def __init__(self, index: PrefixIndex, *, subscription_s: float = _SUBSCRIPTION_S) -> None:
        self._index, self._subscription_s = index, subscription_s

    async def follow(self, worker: Member, channel: grpc.aio.Channel) -> None:
        """Subscribe again and again, until cancelled."""
        stub, logged = worker_pb2_grpc.WorkerStub(channel), ""
        try:
            while True:
                detail = await self._subscribe(worker, stub)
                if detail and detail != logged:
                    _LOG.info("subscribing to cache events again", extra={"worker": str(worker.id), "detail": detail})
                logged = detail
                await asyncio.sleep(_RETRY_PAUSE_S)
        finally:
            self._index.forget(worker.id)

    async def _subscribe(self, worker: Member, stub: worker_pb2_grpc.WorkerStub) -> str:
        """Follow one subscription to its end. Return why it ended early; empty if it did not."""
        since = self._index.next_number(worker.id)
        member = str(worker.id) if since is not None else ""
        request = worker_pb2.SubscribeCacheEventsRequest(member=member, since=since or 0)
        call = stub.SubscribeCacheEvents(request, timeout=self._subscription_s)
        try:
            async for message in call:
                if not self._apply(worker, message):
                    return "events are missing"
        except grpc.aio.AioRpcError as error:
            is_over = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return "" if is_over else f"{error.code().name}: {error.details()}"
        except (InvalidRequest, MalformedMessage) as error:
            return error.message
        finally:
            call.cancel()
        return "the worker ended the subscription"

    def _apply(self, worker: Member, message: worker_pb2.CacheEvents) -> bool:
        """Apply a message to the index. Return False if events are missing. Raises InvalidRequest, MalformedMessage."""
        if message.member not in ("", str(worker.id)):
            self._index.forget(worker.id)
            raise InvalidRequest(f"{message.member} answers at the address of {worker.id}")
        max_blocks = worker.capacity.num_blocks if worker.capacity is not None else 0
        return self._index.apply(worker.id, report_wire.cache_events_from_wire(message), max_blocks=max_blocks)


class RequestChains:
    """The block hashes of one request. Those of its prompt, with which all its token lists begin, are made once for
    each block size: they take milliseconds for 100,000 tokens, and every attempt asks for them several times. Token ids
    are packed as `pack_ids` packs them."""

    def __init__(self, packed_prompt: bytes, salt: str) -> None:
        self._packed_prompt = packed_prompt
        self._salt = salt
        self._of_prompt: dict[int, BlockChain] = {}  # by block size

    def chain(self, key: bytes, block_size: int, packed: bytes) -> BlockChain:
        """Return the chain of `packed`: the prompt, or a part of it, or the prompt with committed tokens."""
        if block_size not in self._of_prompt:
            self._of_prompt[block_size] = keyed_chains(key, block_size)(self._salt, NATIVE)
            self._of_prompt[block_size].extend_packed(self._packed_prompt)
        chain = self._of_prompt[block_size].copy()
        del chain.hashes[len(packed) // ID_BYTES // block_size :]
        if len(packed) > len(self._packed_prompt):
            chain.extend_packed(packed)
        return chain


class PrefixLocator:
    def __init__(self, fleet: Fleet, index: PrefixIndex, key: bytes) -> None:
        """`key`: the key of block hashes."""
        self._key = key
        self._fleet = fleet
        self._index = index

    def cached_tokens(self, packed: bytes, chains: RequestChains) -> dict[MemberId, int]:
        """Return the number of leading tokens that each worker has cached; workers without any are missing. The last
        token never counts: it is always computed. Empty if there are fewer than two workers to choose from.
        """
        members = self._fleet.available()
        if len(members) < 2:
            return {}
        chain, cached = self._chain(members[0], packed[:-ID_BYTES], chains), dict[MemberId, int]()
        num_blocks = self._index.leading_blocks(chain.hashes)
        for member in members:
            if member.capacity is not None and member.id in num_blocks:
                cached[member.id] = num_blocks[member.id] * member.capacity.block_size
        return cached

    def chain(self, worker: MemberId, packed: bytes, chains: RequestChains) -> BlockChain:
        """Return the hashes of these tokens' blocks at this worker. If KV travels quantised, the chain has no hashes,
        because such blocks are never pulled.
        """
        peer = self._fleet.peer(worker)
        member = peer.member if peer is not None else None
        if member is None or member.capacity is None or member.fingerprint is None:
            return NamelessChain()
        if member.fingerprint.wire_dtype != NATIVE:
            return NamelessChain()
        return self._chain(member, packed, chains)

    def leading_blocks(self, chain: BlockChain) -> dict[MemberId, int]:
        """Return how many leading blocks of this chain each worker is expected to have; without workers that have
        none."""
        return self._index.leading_blocks(chain.hashes)

    def num_cached(self, num_blocks: Mapping[MemberId, int], worker: MemberId) -> int:
        """Return how many leading tokens of a chain the worker is expected to have cached. `num_blocks`: the leading
        blocks of the chain."""
        peer = self._fleet.peer(worker)
        if peer is None or peer.member.capacity is None:
            return 0
        return num_blocks.get(worker, 0) * peer.member.capacity.block_size

    def note_routed(self, chain: BlockChain, *workers: MemberId) -> None:
        """Record that each of the workers computes, imports or has generated all blocks of this chain."""
        self._index.note_routed(chain.hashes, *workers)

    def sources(self, num_blocks: Mapping[MemberId, int], *, puller: MemberId) -> tuple[PrefixSource, ...]:
        """Return at most three workers from which `puller` can pull a prefix of a chain, the longest prefix first.
        `num_blocks`: the leading blocks of the chain."""
        pulling = self._fleet.peer(puller)
        if pulling is None:
            return ()
        sources = []
        available = {member.id for member in self._fleet.available()}
        for worker, number in sorted(num_blocks.items(), key=lambda item: -item[1]):
            peer = self._fleet.peer(worker)
            if peer is not None and worker in available and worker != puller and peer.kv_format == pulling.kv_format:
                assert pulling.member.capacity is not None
                num_tokens = number * pulling.member.capacity.block_size
                sources.append(PrefixSource(worker, peer.member.address, num_tokens))
        return tuple(sources[:_MAX_SOURCES])

    def _chain(self, member: Member, packed: bytes, chains: RequestChains) -> BlockChain:
        if member.capacity is None:
            return NamelessChain()
        return chains.chain(self._key, member.capacity.block_size, packed)
