"""The waiting sequences of a worker, in the order of their ranks. Pure. Owned by its queues.

Where tenants compete, every rank changes with every step, because the virtual time of a tenant does; the order of each
tenant's own sequences does not. So sequences are kept in a line per tenant, and have their ranks as far as a step looks
along the lines: at the first ones.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.policies import Rank


@dataclass(slots=True, eq=False)
class _Line:
    """The sequences of one tenant. The first `num_ranked` have their ranks of the last sort; the next one begins at
    virtual time `place`."""

    sequences: list[Sequence] = field(default_factory=list)
    num_ranked: int = 0
    place: float = 0.0

    def rank_next(self, cost: Callable[[Sequence], float]) -> None:
        sequence = self.sequences[self.num_ranked]
        sequence.virtual_start = self.place
        sequence.rank = with_start(own_rank(sequence.rank), self.place)
        self.place += cost(sequence)
        self.num_ranked += 1


class WaitingSequences:
    """Waiting sequences, lowest rank first. As long as one tenant alone has work, all have their ranks."""

    def __init__(self, cost: Callable[[Sequence], float]) -> None:
        """`cost`: by how much a sequence moves the virtual time of its tenant."""
        self._cost = cost
        self._lines: dict[str, _Line] = {}  # by the label of the tenant
        self._present: dict[Sequence, None] = {}
        self._is_by_tenant = False

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._present

    def __iter__(self) -> Iterator[Sequence]:
        """Return the sequences in the order of their ranks, as they are now: changes during the iteration do not change
        what it returns."""
        lines = [(line, tuple(line.sequences)) for line in self._lines.values() if line.sequences]
        heads = [(self._rank_of(line, sequences[0]), number, 0) for number, (line, sequences) in enumerate(lines)]
        heapq.heapify(heads)
        while heads:
            _, number, place = heads[0]
            line, sequences = lines[number]
            yield sequences[place]
            if place + 1 < len(sequences):
                heapq.heapreplace(heads, (self._rank_of(line, sequences[place + 1]), number, place + 1))
            else:
                heapq.heappop(heads)

    @property
    def in_any_order(self) -> Iterable[Sequence]:
        return self._present

    @property
    def num_slots(self) -> int:
        return sum(sequence.num_slots for sequence in self._present)

    @property
    def last_of_tenants(self) -> dict[str, Sequence]:
        """Return the last sequence of each tenant, by the tenant's label."""
        return {label: line.sequences[-1] for label, line in self._lines.items() if line.sequences}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence with its rank."""
        line = self._lines.setdefault(sequence.group.job.tenant.label, _Line())
        place = bisect_left(line.sequences, self._key(sequence), key=self._key)
        line.sequences.insert(place, sequence)
        if place <= line.num_ranked:  # a preempted one began, by the last sort, before those that have no rank yet
            line.num_ranked += 1
        self._present[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.group.job.tenant.label]
        place = bisect_left(line.sequences, self._key(sequence), key=self._key)
        assert line.sequences[place] is sequence, "a rank changed while its sequence waited"
        while line.num_ranked <= place:  # the ranks of the sequences after it include its cost until the next sort
            line.rank_next(self._cost)
        del line.sequences[place]
        line.num_ranked -= 1
        del self._present[sequence]

    def rank_by_policy(self, rank: Callable[[Sequence], Rank]) -> None:
        """Give all sequences new ranks, and sort them."""
        for sequence in self._present:
            sequence.rank = rank(sequence)
        for line in self._lines.values():
            line.sequences.sort(key=self._key)

    def begin_ranks(self, places: Mapping[str, float]) -> None:
        """Begin to rank by tenants. `places`: the virtual time at which the first work of each tenant begins."""
        was_by_tenant, self._is_by_tenant = self._is_by_tenant, True
        self._lines = {label: line for label, line in self._lines.items() if line.sequences}
        for label, place in places.items():
            line = self._lines.setdefault(label, _Line())
            line.num_ranked, line.place = 0, place
            if not was_by_tenant:
                line.sequences.sort(key=self._key)

    def advance(self, label: str, own: Rank, cost: float) -> float:
        """Rank the sequences of a tenant that come before other work of it, whose rank without a virtual start is
        `own`. Return when that work begins; it has this cost."""
        line = self._lines[label]
        while line.num_ranked < len(line.sequences) and own_rank(line.sequences[line.num_ranked].rank) < own:
            line.rank_next(self._cost)
        place = line.place
        line.place += cost
        return place

    def rank_alike(self) -> None:
        """Rank all sequences without virtual starts: one tenant alone has work."""
        self._is_by_tenant = False
        for line in self._lines.values():
            for sequence in line.sequences:
                sequence.virtual_start, sequence.rank = 0.0, with_start(own_rank(sequence.rank), 0.0)
            line.num_ranked = len(line.sequences)

    def check(self) -> None:
        """Raise AssertionError if a line is out of order."""
        lines = self._lines.values()
        assert self._present.keys() == {sequence for line in lines for sequence in line.sequences}
        assert len(self) == sum(len(line.sequences) for line in lines), "a sequence waits twice"
        for line in lines:
            keys = [self._key(sequence) for sequence in line.sequences]
            assert keys == sorted(set(keys)), f"ranks out of order, or not all different: {keys}"
            assert self._is_by_tenant or line.num_ranked == len(keys), "a sequence has no rank"
        assert not any(sequence.charged for sequence in self._present), "a waiting sequence was charged"

    def _key(self, sequence: Sequence) -> Rank:
        return own_rank(sequence.rank) if self._is_by_tenant else sequence.rank

    def _rank_of(self, line: _Line, sequence: Sequence) -> Rank:
        """Return the rank of a sequence of this line, which may have left it during an iteration."""
        own = own_rank(sequence.rank)
        while line.num_ranked < len(line.sequences) and own_rank(line.sequences[line.num_ranked].rank) <= own:
            line.rank_next(self._cost)
        return sequence.rank


def own_rank(rank: Rank) -> Rank:
    """Return a rank among the work of one tenant."""
    return (rank[0], *rank[2:])


def with_start(own: Rank, start: float) -> Rank:
    """Return the rank among the work of all tenants."""
    return (own[0], start, *own[1:])
