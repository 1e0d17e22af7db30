"""The queues of a worker, by rank: hand-offs that wait for blocks, and sequences that run, are ready, wait or are
frozen. Pure. The scheduler owns the reservations, the batch owns the queues of sequences.

A hand-off gets all its blocks at once or none, in the policy's order, so there is no hold-and-wait. A pull gets all its
blocks at once or is refused: it may speed up a prompt, and must never delay another one.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import chain

from cluster.request_size import blocks_for
from engine.kv.block_pool import BlockPool
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.commands import Reserve
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import FirstCome, Policy, Rank, Work, displaces, full_rank


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
    rank: Rank = ()  # at the last sort; lower ranks go first


@dataclass(frozen=True, slots=True)
class BlockGrant:
    request: BlockRequest
    block_ids: tuple[int, ...]
    num_cached: int  # leading blocks that were found in the prefix cache


class Reservations:
    """Requests wait in the order of their ranks; grants are held until their hand-off is admitted or discarded."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
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
    def handoff_ids(self) -> Iterator[int]:
        """The hand-offs and pulls that wait for blocks or hold blocks."""
        return chain(self._requests, self._grants, self._pulls)

    @property
    def granted_block_ids(self) -> list[int]:
        granted = (grant.block_ids for grant in self._grants.values())
        return list(chain.from_iterable((*granted, *self._pulls.values())))

    @property
    def first(self) -> BlockRequest | None:
        return next(iter(self._requests.values()), None)

    def add(self, request: BlockRequest) -> None:
        assert request.handoff_id not in self._requests and request.handoff_id not in self._grants, (
            f"{request} reserves twice"
        )
        self._requests[request.handoff_id] = request

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

    def pop_grant(self, handoff_id: int) -> BlockGrant | None:
        """Remove a grant and return it. The caller owns the references to its blocks. Returns None if nothing was
        granted."""
        return self._grants.pop(handoff_id, None)

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        """Drop a request, or free the blocks of a grant or a pull except `quarantined` ones, which go to quarantine.
        Does nothing if it was admitted or discarded before."""
        self._requests.pop(handoff_id, None)
        grant = self._grants.pop(handoff_id, None)
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


@dataclass(slots=True, eq=False)
class RankedSequences:
    """A list of sequences in rank order, lowest rank first."""

    _sequences: list[Sequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    @property
    def last(self) -> Sequence | None:
        return self._sequences[-1] if self._sequences else None

    @property
    def last_decoded_here(self) -> Sequence | None:
        """Return the last sequence that is not an export."""
        return next((s for s in reversed(self._sequences) if s.group.export is None), None)

    @property
    def num_slots(self) -> int:
        return sum(sequence.num_slots for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def sort(self, rank: Callable[[Sequence], Rank]) -> None:
        """Compute all ranks again and sort by them."""
        for sequence in self._sequences:
            sequence.rank = rank(sequence)
        self._sequences.sort(key=_rank)


class Ranking:
    """The rank of sequences and of hand-offs that wait for blocks, by the policy and the time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # Ranks of first come, first served never change, so a step need not sort.
        self._is_fixed = isinstance(policy, FirstCome)

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        """Return the policy's rank at `now_s`. Choices of one group are ordered by their index."""
        return (*full_rank(self.policy, _work(sequence, now_s), now_s), sequence.choices[0][0])

    def request_rank(self, request: BlockRequest, now_s: float) -> Rank:
        return full_rank(self.policy, _request_work(request, now_s), now_s)

    def sort(self, places: Iterable[RankedSequences], now_s: float) -> None:
        if not self._is_fixed:
            for place in places:
                place.sort(lambda sequence: self.rank(sequence, now_s))

    def may_preempt(self, running: Sequence) -> bool:
        """Return whether a waiting sequence or hand-off may ever preempt this running sequence."""
        return self.policy.is_preemptive or running.group.job.is_batch

    def displaces(self, waiting: Sequence | BlockRequest, running: Sequence, now_s: float) -> bool:
        work = _work(waiting, now_s) if isinstance(waiting, Sequence) else _request_work(waiting, now_s)
        return displaces(self.policy, work, _work(running, now_s), now_s)


class SequenceQueues:
    """A sequence is in exactly one of the four queues from `add_waiting`, `add_ready` or `add_running` until
    `remove`."""

    def __init__(self, ranking: Ranking, max_num_seqs: int) -> None:
        self._ranking = ranking
        self._max_num_seqs = max_num_seqs
        self.running = RankedSequences()  # have blocks and slots
        self.ready = RankedSequences()  # have blocks, wait for slots
        self.waiting = RankedSequences()  # have no blocks
        self.frozen = RankedSequences()  # have blocks; may continue on another worker

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - self.running.num_slots

    @property
    def holders(self) -> tuple[Sequence, ...]:
        """The sequences with blocks that steps may contain. Any of them may lose its slots."""
        return (*self.running, *self.ready)

    @property
    def last_holder(self) -> Sequence | None:
        """The sequence with blocks that ranks last."""
        return max((s for s in (self.running.last, self.ready.last) if s), key=lambda s: s.rank, default=None)

    @property
    def last_preemptible(self) -> Sequence | None:
        """The sequence that ranks last of those that may lose their blocks. An export keeps its own: an importer may
        read them already, and it ends without waiting for anything here."""
        found = (places.last_decoded_here for places in (self.running, self.ready))
        return max((s for s in found if s), key=lambda s: s.rank, default=None)

    def sort(self, now_s: float) -> None:
        """Sort by the ranks at `now_s`."""
        self._ranking.sort((self.running, self.ready, self.waiting), now_s)

    def start_running(self, sequence: Sequence, now_s: float) -> None:
        """Move a ready or waiting sequence to the running queue."""
        self._remove(sequence)
        sequence.run(now_s)
        self._put(self.running, sequence, now_s)

    def add_running(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence that was split off a running one."""
        self._put(self.running, sequence, now_s)

    def add_ready(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence that is in no queue. It waits from `now_s`, unless it waits already."""
        sequence.wait(now_s)
        self._put(self.ready, sequence, now_s)

    def add_waiting(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence that is in no queue and has no blocks. It waits from `now_s`, unless it waits already."""
        sequence.wait(now_s)
        self._put(self.waiting, sequence, now_s)

    def move_to_ready(self, sequence: Sequence, now_s: float) -> None:
        """Take the slots of a running sequence. It waits from `now_s`."""
        self.running.remove(sequence)
        self.add_ready(sequence, now_s)

    def freeze(self, sequence: Sequence, now_s: float) -> None:
        self.running.remove(sequence)
        self._put(self.frozen, sequence, now_s)

    def thaw(self, sequence: Sequence, now_s: float) -> None:
        self.frozen.remove(sequence)
        self.add_ready(sequence, now_s)

    def remove(self, sequence: Sequence) -> None:
        self._remove(sequence)

    def remove_choice(self, sequence: Sequence, handle: int, now_s: float) -> None:
        """Remove one of several choices. The rank of the sequence may change."""
        place = self._remove(sequence)
        sequence.choices = tuple(choice for choice in sequence.choices if choice[1].handle != handle)
        sequence.num_slots = len(sequence.choices)
        self._put(place, sequence, now_s)

    def check(self, live: set[int]) -> None:
        """Raise AssertionError if a sequence is missing, in a wrong queue or out of order. `live`: the numbers of the
        sequences that must be here."""
        everywhere = (*self.running, *self.ready, *self.waiting, *self.frozen)
        present = [sequence.number for sequence in everywhere]
        assert sorted(present) == sorted(live), f"sequences {present} are here, {live} are live"
        assert self.num_free_slots >= 0, f"{self.running.num_slots} running"
        assert not any(s.block_ids or s.spare_ids for s in self.waiting), "a waiting sequence has blocks"
        for place in (self.running, self.ready, self.waiting):
            ranks = [sequence.rank for sequence in place]
            assert ranks == sorted(set(ranks)), f"ranks out of order, or not all different: {ranks}"
        assert not any(
            s.waits_since_s is not None and s.num_left == 1 and s.group.export is None for s in self.running
        ), "a sequence waits while it decodes"
        assert all(s.waits_since_s is not None for s in (*self.ready, *self.waiting)), "a sequence does not wait"

    def _put(self, place: RankedSequences, sequence: Sequence, now_s: float) -> None:
        sequence.rank = self._ranking.rank(sequence, now_s)
        place.add(sequence)

    def _remove(self, sequence: Sequence) -> RankedSequences:
        place = next(p for p in (self.running, self.ready, self.waiting, self.frozen) if sequence in p)
        place.remove(sequence)
        return place


def block_request_of(
    command: Reserve, number: int, now_s: float, block_size: int, lengths: LengthPredictor | None
) -> BlockRequest:
    """Return the request of a hand-off, which is the `number`-th arrival. Another worker computes its prompt."""
    work, num_to_grow = Work(arrival=number, arrived_s=now_s, deadline_s=math.inf, num_prompt=0), 0
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
    return BlockRequest(number, command.handoff_id, command.num_blocks, command.block_hashes, work, now_s, num_to_grow)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _work(sequence: Sequence, now_s: float) -> Work:
    group = sequence.group
    waits = sequence.waits_since_s is not None
    num_prompt, num_done, predicted_tokens = group.num_prompt, sequence.num_done, sequence.predicted_tokens
    if group.export is not None:
        # All that it computes is a prompt. Cached tokens cost nothing, and its output comes with its last chunk.
        num_prompt = len(sequence.token_ids) - sequence.num_cached
        num_done, predicted_tokens = num_done - sequence.num_cached, 1
    return Work(
        arrival=group.number,
        arrived_s=group.admitted_s - group.job.age_s,
        deadline_s=group.admitted_s + group.job.timeout_s,
        num_prompt=num_prompt,
        num_done=num_done,
        predicted_tokens=predicted_tokens,
        priority=group.job.priority,
        is_batch=group.job.is_batch,
        is_resumed=group.job.is_interrupted,
        waited_s=sequence.waited_s if sequence.waits_since_s is None else now_s - sequence.waits_since_s,
        num_since_wait=0 if waits else sequence.num_done - sequence.num_done_waiting,
    )


def _request_work(request: BlockRequest, now_s: float) -> Work:
    return replace(request.work, waited_s=now_s - request.since_s)
