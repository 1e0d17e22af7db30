"""The queues of a worker, by rank: sequences that run, are ready, wait or are frozen. Pure. Owned by the batch."""

from engine.scheduling.batching.ranking import RankedSequences, Ranking
from engine.scheduling.batching.reservations import Reservations
from engine.scheduling.batching.sequences import Sequence


class SequenceQueues:
    """A sequence is in exactly one of the four queues from `add_waiting`, `add_ready` or `add_running` until
    `remove`."""

    def __init__(self, ranking: Ranking, reservations: Reservations, max_num_seqs: int) -> None:
        self._ranking = ranking
        self._reservations = reservations
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
        """Sort the sequences and the hand-offs that wait for blocks by the ranks at `now_s`."""
        self._ranking.sort((self.running, self.ready, self.waiting), self._reservations, now_s)

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
