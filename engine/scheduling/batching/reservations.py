"""The hand-offs that wait for blocks or hold them, and the pulls that hold them. Pure. Owned by the scheduler.

A hand-off gets all its blocks at once or none, in the order of ranks. Its exporter does the same, and may be full of
finished prompts that wait for blocks here. So blocks that are granted before the exporter has begun to compute leave
enough for a hand-off whose exporter has: that one ends without anything more from its exporter's pool. A pull gets all
its blocks at once or is refused: it may speed up a prompt, and must never delay another one.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import chain

from cluster.fair_queue import FairQueue
from cluster.messages import NO_TENANT, TenantShare
from cluster.request_size import blocks_for
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.sequences import expected_output_left
from engine.scheduling.commands import Reserve
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import Rank, Work


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """The request of one hand-off for all its blocks."""

    number: int  # order of arrival, comparable with `Group.number`
    handoff_id: int
    num_blocks: int
    block_hashes: tuple[bytes, ...]  # of the leading blocks, which may be in the prefix cache
    work: Work
    since_s: float
    num_to_grow: int  # further blocks that its sequences are predicted to need
    tenant: TenantShare = NO_TENANT
    num_output_left: int = 1  # tokens that its sequences are expected to generate
    is_announced: bool = False  # the exporter has begun to compute, so it has all blocks that it needs
    mark: int = 0  # of its request, as of an ExportWait
    rank: Rank = ()  # at the last sort; lower ranks go first


@dataclass(frozen=True, slots=True)
class BlockGrant:
    request: BlockRequest
    block_ids: tuple[int, ...]
    num_cached: int  # leading blocks that were found in the prefix cache


class Reservations:
    """Requests wait in the order of their ranks; grants are held until their hand-off is admitted or discarded.
    `tenants` counts both."""

    def __init__(self, pool: BlockPool, tenants: FairQueue, *, num_longest: int, num_watermark: int) -> None:
        """`num_longest`: the blocks of a sequence of the maximum length. `num_watermark`: blocks that every grant
        leaves."""
        self._pool = pool
        self._num_longest = num_longest
        self._num_watermark = num_watermark
        self.num_exported: Callable[[], int] = lambda: 0  # blocks of exports, which wait for other workers too
        self.leaves_room_for_export = False  # for the longest one, before it comes
        self._tenants = tenants
        self._requests: dict[int, BlockRequest] = {}  # by hand-off, in the order of their ranks
        self._grants: dict[int, BlockGrant] = {}
        self._pulls: dict[int, tuple[int, ...]] = {}

    @property
    def num_pulls(self) -> int:
        return len(self._pulls)

    @property
    def num_blocks_waited_for(self) -> int:
        """The number of blocks that waiting hand-offs need."""
        return sum(request.num_blocks for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        return len(self._requests)

    @property
    def waiting_handoff_ids(self) -> tuple[int, ...]:
        return tuple(self._requests)

    @property
    def waiting_tenants(self) -> list[TenantShare]:
        """The tenant of each waiting request."""
        return [request.tenant for request in self._requests.values()]

    @property
    def handoff_ids(self) -> Iterator[int]:
        """The hand-offs and pulls that wait for blocks or hold blocks."""
        return chain(self._requests, self._grants, self._pulls)

    @property
    def granted_block_ids(self) -> list[int]:
        granted = (grant.block_ids for grant in self._grants.values())
        return list(chain.from_iterable((*granted, *self._pulls.values())))

    @property
    def requests(self) -> list[tuple[BlockRequest, bool]]:
        """Return every request and whether it waits; one that does not wait was granted."""
        waiting = [(request, True) for request in self._requests.values()]
        return waiting + [(grant.request, False) for grant in self._grants.values()]

    @property
    def first(self) -> BlockRequest | None:
        """Return the first request that need not wait for its announcement."""
        requests = self._requests.values()
        head = next(iter(requests), None)
        if head is None or head.is_announced:
            return head
        room = self.num_spare - max(self.num_exported(), self._num_longest if self.leaves_room_for_export else 0)
        return next((request for request in requests if request.is_announced or request.num_blocks <= room), None)

    @property
    def num_spare(self) -> int:
        """Return the number of blocks that may still be granted to hand-offs whose exporter has not begun to compute,
        so that the longest hand-off whose exporter computes will fit. Negative: they have too many already."""
        waiting = (request.num_blocks for request in self._requests.values())
        num_left = max(self._num_longest, *waiting, 0) + self._num_watermark
        return self._pool.num_blocks - num_left - self.num_early

    @property
    def num_early(self) -> int:
        """Return the number of blocks that were granted to hand-offs whose exporter had not begun to compute."""
        return sum(len(grant.block_ids) for grant in self._grants.values() if not grant.request.is_announced)

    def add(self, request: BlockRequest) -> None:
        assert request.handoff_id not in self._requests and request.handoff_id not in self._grants, (
            f"{request} reserves twice"
        )
        self._requests[request.handoff_id] = request
        self._tenants.enter(request.tenant)

    def announce(self, handoff_id: int) -> None:
        """Record that the exporter has begun to compute. Does nothing if the request does not wait."""
        if (request := self._requests.get(handoff_id)) is not None:
            self._requests[handoff_id] = replace(request, is_announced=True)

    def sort(self, rank: Callable[[BlockRequest, float], Rank], now_s: float) -> None:
        ranked = sorted(
            (replace(request, rank=rank(request, now_s)) for request in self._requests.values()), key=lambda c: c.rank
        )
        self._requests = {request.handoff_id: request for request in ranked}

    def num_newly_used(self, request: BlockRequest) -> int:
        """Return by how much `num_available` falls if this request is granted now."""
        found = self._pool.find(request.block_hashes)
        num_idle = self._pool.num_available - self._pool.num_available_beside(found)
        return request.num_blocks - len(found) + num_idle

    def grant(self, blocks_to_leave: Callable[[BlockRequest], int]) -> list[BlockGrant]:
        """Grant requests in rank order as long as `blocks_to_leave(request)` blocks remain available."""
        granted = []
        while (request := self.first) is not None:
            if self._pool.num_available - self.num_newly_used(request) < blocks_to_leave(request):
                break
            cached = self._pool.find(request.block_hashes)
            block_ids = self._pool.reserve_beside(cached, request.num_blocks - len(cached))
            assert block_ids is not None
            del self._requests[request.handoff_id]
            grant = self._grants[request.handoff_id] = BlockGrant(request, block_ids, len(cached))
            granted.append(grant)
        return granted

    def refuse(self, handoff_id: int) -> None:
        """Drop a request that waits."""
        self._tenants.leave(self._requests.pop(handoff_id).tenant)

    def pop_grant(self, handoff_id: int) -> BlockGrant | None:
        """Remove a grant and return it. The caller owns the references to its blocks. Returns None if nothing was
        granted."""
        grant = self._grants.pop(handoff_id, None)
        if grant is not None:
            self._tenants.leave(grant.request.tenant)
        return grant

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """Drop a request, or free the blocks of a grant or a pull except `quarantined` ones, which go to quarantine.
        Does nothing if it was admitted or discarded before."""
        if handoff_id in self._requests:
            self.refuse(handoff_id)
        grant = self.pop_grant(handoff_id)
        block_ids = grant.block_ids if grant is not None else self._pulls.pop(handoff_id, ())
        foreign = quarantined - set(block_ids)
        assert not foreign, f"hand-off {handoff_id} quarantines {sorted(foreign)}, which it does not hold"
        self._pool.quarantine(sorted(quarantined), handoff_id)
        self._pool.drop_references([block_id for block_id in block_ids if block_id not in quarantined])

    def reserve_pull(
        self, pull_id: int, block_hashes: SequenceOf[bytes], *, num_to_leave: int
    ) -> tuple[tuple[int, ...], int] | None:
        """Return the blocks of a pull, and how many leading ones hold their content already. None: fewer than
        `num_to_leave` blocks would stay available."""
        assert pull_id not in self.handoff_ids, f"pull {pull_id} reserves twice"
        found = self._pool.find(block_hashes)
        num_fresh = len(block_hashes) - len(found)
        if self._pool.num_available_beside(found) - num_fresh < num_to_leave:
            return None
        block_ids = self._pool.reserve_beside(found, num_fresh)
        assert block_ids is not None
        self._pulls[pull_id] = block_ids
        return block_ids, len(found)

    def pop_pull(self, pull_id: int) -> tuple[int, ...]:
        """Remove a pull and return its blocks. The caller owns the references to them."""
        return self._pulls.pop(pull_id)


def block_request_of(
    command: Reserve, number: int, now_s: float, block_size: int, lengths: LengthPredictor | None
) -> BlockRequest:
    """Return the request of a hand-off, which is the `number`-th arrival. Another worker computes its prompt."""
    work, num_to_grow = Work(arrival=number, arrived_s=now_s, deadline_s=math.inf, num_prompt=0), 0
    tenant, num_output_left, mark = NO_TENANT, 1, 0
    if (job := command.job) is not None:
        num_prompt, num_output = len(job.prompt_token_ids), len(job.sequences[0].committed_token_ids)
        predicted = 0
        if lengths is not None:
            predicted = lengths.predict(job.cache_salt, num_prompt, num_output, job.stops.max_tokens)
        work = Work(
            arrival=number,
            arrived_s=now_s - job.age_s,
            deadline_s=now_s + job.timeout_s,
            num_prompt=num_prompt,
            num_done=num_prompt + num_output,
            predicted_tokens=predicted,
            priority=job.priority,
            is_batch=job.is_batch,
            is_resumed=job.is_interrupted,
        )
        known, most = num_prompt + num_output, num_prompt + max(num_output, predicted - 1)
        num_to_grow = len(job.sequences) * (blocks_for(most, block_size) - blocks_for(known, block_size))
        tenant, mark = job.tenant, zlib.crc32(job.request_id.encode())
        num_output_left = len(job.sequences) * expected_output_left(job, num_output, predicted)
    return BlockRequest(
        number=number,
        handoff_id=command.handoff_id,
        num_blocks=command.num_blocks,
        block_hashes=command.block_hashes,
        work=work,
        since_s=now_s,
        num_to_grow=num_to_grow,
        is_announced=command.is_announced,
        tenant=tenant,
        num_output_left=num_output_left,
        mark=mark,
    )
