"""Estimates which workers hold the beginning of a prompt, for placement and for pulls.

The prefix index (router/policies/prefix_index.py) decides; this module feeds it. `CacheEventFollower` subscribes to the
cache events of every worker. `PrefixLocator` names the blocks of a prompt and asks the index. A wrong estimate
costs a cache miss, never a wrong token: the worker computes what it does not find.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from cluster.errors import InvalidRequest, MalformedMessage
from cluster.member import Member
from cluster.messages import MemberId, PrefixSource
from cluster.protocol import report_wire
from cluster.protocol.hashing import NATIVE, BlockChain, NamelessChain, keyed_chains
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
    each block size: they take 10 ms for 100,000 tokens, and every attempt asks for them several times."""

    def __init__(self, prompt_token_ids: Sequence[int], salt: str) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._salt = salt
        self._of_prompt: dict[int, BlockChain] = {}  # by block size

    def chain(self, key: bytes, block_size: int, token_ids: Sequence[int]) -> BlockChain:
        """Return the chain of `token_ids`: the prompt, or a part of it, or the prompt with committed tokens."""
        if block_size not in self._of_prompt:
            self._of_prompt[block_size] = keyed_chains(key, block_size)(self._salt, NATIVE)
            self._of_prompt[block_size].extend(self._prompt_token_ids)
        chain = self._of_prompt[block_size].copy()
        del chain.hashes[len(token_ids) // block_size :]
        if len(token_ids) > len(self._prompt_token_ids):
            chain.extend(token_ids)
        return chain


class PrefixLocator:
    def __init__(self, fleet: Fleet, index: PrefixIndex, key: bytes) -> None:
        """`key`: the key of block hashes."""
        self._key = key
        self._fleet = fleet
        self._index = index

    def cached_tokens(self, token_ids: Sequence[int], chains: RequestChains) -> dict[MemberId, int]:
        """Return the number of leading tokens that each worker has cached; workers without any are missing. The last
        token never counts: it is always computed. Empty if there are fewer than two workers to choose from.
        """
        members = self._fleet.available()
        if len(members) < 2:
            return {}
        chain, cached = self._chain(members[0], token_ids[:-1], chains), dict[MemberId, int]()
        num_blocks = self._index.leading_blocks(chain.hashes)
        for member in members:
            if member.capacity is not None and member.id in num_blocks:
                cached[member.id] = num_blocks[member.id] * member.capacity.block_size
        return cached

    def chain(self, worker: MemberId, token_ids: Sequence[int], chains: RequestChains) -> BlockChain:
        """Return the hashes of these tokens' blocks at this worker. If KV travels quantised, the chain has no hashes,
        because such blocks are never pulled.
        """
        peer = self._fleet.peer(worker)
        member = peer.member if peer is not None else None
        if member is None or member.capacity is None or member.fingerprint is None:
            return NamelessChain()
        if member.fingerprint.wire_dtype != NATIVE:
            return NamelessChain()
        return self._chain(member, token_ids, chains)

    def num_cached(self, chain: BlockChain, worker: MemberId) -> int:
        """Return how many leading tokens of this chain the worker is expected to have cached."""
        peer = self._fleet.peer(worker)
        if peer is None or peer.member.capacity is None:
            return 0
        return self._index.leading_blocks(chain.hashes).get(worker, 0) * peer.member.capacity.block_size

    def note_routed(self, chain: BlockChain, worker: MemberId) -> None:
        """Record that the worker computes, imports or has generated all blocks of this chain."""
        self._index.note_routed(chain.hashes, worker)

    def sources(self, chain: BlockChain, *, puller: MemberId) -> tuple[PrefixSource, ...]:
        """Return at most three workers from which `puller` can pull a prefix of this chain, the longest prefix
        first."""
        pulling = self._fleet.peer(puller)
        if pulling is None:
            return ()
        sources = []
        available = {member.id for member in self._fleet.available()}
        for worker, num_blocks in sorted(self._index.leading_blocks(chain.hashes).items(), key=lambda item: -item[1]):
            peer = self._fleet.peer(worker)
            if peer is not None and worker in available and worker != puller and peer.kv_format == pulling.kv_format:
                assert pulling.member.capacity is not None
                num_tokens = num_blocks * pulling.member.capacity.block_size
                sources.append(PrefixSource(worker, peer.member.address, num_tokens))
        return tuple(sources[:_MAX_SOURCES])

    def _chain(self, member: Member, token_ids: Sequence[int], chains: RequestChains) -> BlockChain:
        if member.capacity is None:
            return NamelessChain()
        return chains.chain(self._key, member.capacity.block_size, token_ids)
