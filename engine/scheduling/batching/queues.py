"""The queues of a worker: sequences that run, are ready, wait or are frozen, in the order of class, tenant and policy,
as are the hand-offs that wait for blocks. Pure. Owned by the batch.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter

from cluster.fair_queue import Demand, FairQueue
from cluster.messages import DecodeJob, TenantShare
from engine.scheduling.batching.reservations import BlockRequest, Reservations
from engine.scheduling.batching.sequences import Sequence, expected_output_left
from engine.scheduling.batching.waiting import WaitingSequences, own_rank, with_start
from engine.scheduling.policies import (
    PROMPT_TOKENS_PER_OUTPUT,
    FirstCome,
    Policy,
    Rank,
    Work,
    displaces,
    full_rank,
)


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

    def sort(self) -> None:
        """Sort again, after ranks have changed."""
        self._sequences.sort(key=_rank)


class Ranking:
    """The rank of sequences and of hand-offs that wait for blocks: class, tenant, policy. Where one tenant alone has
    work, `tenants` changes nothing."""

    def __init__(self, policy: Policy, tenants: FairQueue) -> None:
        self.policy = policy
        self._tenants = tenants
        # Ranks of first come, first served never change, so a step need not sort.
        self._is_fixed = isinstance(policy, FirstCome)
        self._by_tenant = False  # whether the last sort ordered tenants
        self._request_starts: dict[int, float] = {}  # virtual starts by hand-off, if it did

    @property
    def orders_tenants(self) -> bool:
        """Return whether the next sort has to look at tenants."""
        return self._by_tenant or self._tenants.is_contended

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        """Return the rank at `now_s`. Choices of one group are ordered by their index."""
        work = _work(sequence, now_s)
        return (*full_rank(self.policy, work, now_s, sequence.virtual_start), sequence.choices[0][0])

    def request_rank(self, request: BlockRequest, now_s: float) -> Rank:
        start = self._request_starts.get(request.handoff_id, 0.0)
        return full_rank(self.policy, _request_work(request, now_s), now_s, start)

    def sort(
        self,
        places: SequenceOf[RankedSequences],
        waiting: WaitingSequences,
        reservations: Reservations,
        now_s: float,
    ) -> None:
        """Sort sequences and hand-offs by the ranks at `now_s`."""
        orders_tenants = self.orders_tenants
        if not self._is_fixed:
            for sequence in chain.from_iterable(places):
                sequence.rank = self.rank(sequence, now_s)
            waiting.rank_by_policy(lambda sequence: self.rank(sequence, now_s))
        if orders_tenants:
            self._order_tenants([*chain.from_iterable(places)], waiting, reservations, now_s)
        if orders_tenants or not self._is_fixed:
            for place in places:
                place.sort()
        reservations.sort(self.request_rank, now_s)

    def may_preempt(self, running: Sequence) -> bool:
        """Return whether a waiting sequence or hand-off may ever preempt this running sequence."""
        return self.policy.is_preemptive or running.group.job.is_batch or self.orders_tenants

    def displaces(self, waiting: Sequence | BlockRequest, running: Sequence, now_s: float) -> bool:
        """Return whether `waiting` may take slots and blocks of `running`. Work of another tenant may if it would end
        before `running` began, in virtual time: then the two do not displace each other in turn."""
        if self._are_of_tenants(waiting, running):
            if isinstance(waiting, BlockRequest):
                demand, start = _request_demand(waiting), self._request_starts[waiting.handoff_id]
            else:
                demand, start = _demand(waiting), waiting.virtual_start
            return start + demand.cost <= running.virtual_start
        work = _work(waiting, now_s) if isinstance(waiting, Sequence) else _request_work(waiting, now_s)
        return displaces(self.policy, work, _work(running, now_s), now_s)

    def overtakes(self, waiting: Sequence, running: Sequence, now_s: float) -> bool:
        """Return whether the prompt `waiting` comes before the prompt `running` in a step, which takes nothing from
        that but time."""
        if self._are_of_tenants(waiting, running):
            return waiting.rank < running.rank
        return self.displaces(waiting, running, now_s)

    def _are_of_tenants(self, one: Sequence | BlockRequest, other: Sequence) -> bool:
        """Return whether the tenants decide between the two: they have one class and different tenants."""
        is_batch = one.work.is_batch if isinstance(one, BlockRequest) else one.group.job.is_batch
        is_one_class = is_batch == other.group.job.is_batch
        return self._by_tenant and is_one_class and _tenant(one).label != _tenant(other).label

    def _order_tenants(
        self, holders: list[Sequence], waiting: WaitingSequences, reservations: Reservations, now_s: float
    ) -> None:
        """Put the virtual starts into the ranks of sequences, and keep those of hand-offs. Each tenant's own work is in
        the order of class and policy. Granted hand-offs count, and need no rank any more. Waiting sequences are ranked
        as far as others are behind them; the rest when they are looked at."""
        self._by_tenant = self._tenants.is_contended
        pieces: list[tuple[Rank, Demand, Sequence | BlockRequest]] = [
            *((own_rank(sequence.rank), _demand(sequence), sequence) for sequence in holders),
            *(
                (own_rank(self.request_rank(request, now_s)), _request_demand(request, waits=waits), request)
                for request, waits in reservations.requests
            ),
        ]
        pieces.sort(key=itemgetter(0))
        if self._by_tenant:
            last = ((own_rank(each.rank), each.group.job.tenant) for each in waiting.last_of_tenants.values())
            waiting.begin_ranks(self._tenants.places([(own, demand) for own, demand, _ in pieces], last))
        else:
            waiting.rank_alike()
        self._request_starts = {}
        for own, demand, piece in pieces:
            start = waiting.advance(demand.tenant.label, own, demand.cost) if self._by_tenant else 0.0
            if isinstance(piece, BlockRequest):
                self._request_starts[piece.handoff_id] = start
            else:
                piece.virtual_start, piece.rank = start, with_start(own, start)


def prompt_cost(num_tokens: int) -> float:
    """Return the cost of tokens of a prompt, in tokens of output."""
    return num_tokens / PROMPT_TOKENS_PER_OUTPUT


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


def _tenant(piece: Sequence | BlockRequest) -> TenantShare:
    return piece.tenant if isinstance(piece, BlockRequest) else piece.group.job.tenant


def _demand(sequence: Sequence) -> Demand:
    job, is_export = sequence.group.job, sequence.group.export is not None
    is_prompt = sequence.num_left > (0 if is_export else 1)
    cost_left = prompt_cost(sequence.num_left)
    if isinstance(job, DecodeJob):
        cost_left += sequence.num_slots * expected_output_left(job, sequence.num_output, sequence.predicted_tokens)
    waits = is_prompt or sequence.waits_since_s is not None
    return Demand(job.tenant, cost_left, sequence.charged if is_prompt else 0.0, waits)


def _waiting_cost(sequence: Sequence) -> float:
    return _demand(sequence).cost


def _request_demand(request: BlockRequest, *, waits: bool = True) -> Demand:
    return Demand(request.tenant, float(request.num_output_left), waits=waits)


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


class SequenceQueues:
    """A sequence is in exactly one of the four queues from `add_waiting`, `add_ready` or `add_running` until
    `remove`."""

    def __init__(self, ranking: Ranking, reservations: Reservations, max_num_seqs: int) -> None:
        self._ranking = ranking
        self._reservations = reservations
        self._max_num_seqs = max_num_seqs
        self.running = RankedSequences()  # have blocks and slots
        self.ready = RankedSequences()  # have blocks, wait for slots
        self.waiting = WaitingSequences(_waiting_cost)  # have no blocks
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
        """Sort the sequences and the hand-offs that wait for blocks by the ranks at `now_s`."""
        self._ranking.sort((self.running, self.ready), self.waiting, self._reservations, now_s)

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
        self.waiting.check()
        for place in (self.running, self.ready):
            ranks = [sequence.rank for sequence in place]
            assert ranks == sorted(set(ranks)), f"ranks out of order, or not all different: {ranks}"
        assert not any(
            s.waits_since_s is not None and s.num_left == 1 and s.group.export is None for s in self.running
        ), "a sequence waits while it decodes"
        assert all(s.waits_since_s is not None for s in (*self.ready, *self.waiting)), "a sequence does not wait"

    def _put(self, place: RankedSequences | WaitingSequences, sequence: Sequence, now_s: float) -> None:
        sequence.rank = self._ranking.rank(sequence, now_s)
        place.add(sequence)

    def _remove(self, sequence: Sequence) -> RankedSequences | WaitingSequences:
        places: tuple[RankedSequences | WaitingSequences, ...] = (self.waiting, self.running, self.ready, self.frozen)
        place = next(each for each in places if sequence in each)
        place.remove(sequence)
        return place
