"""Where each sequence is: running, ready, waiting or frozen, in order. Pure. Owned by the batch."""

from collections.abc import Iterator

from decode_worker.scheduling.ranking import Ranking
from decode_worker.scheduling.sequences import ByRank, Sequence


class Places:
    """A sequence is in exactly one of four places from `wait_...` until `take_out`."""

    def __init__(self, ranking: Ranking, max_num_seqs: int) -> None:
        self._ranking = ranking
        self._max_num_seqs = max_num_seqs
        self.is_open = True  # whether those that never ran may run
        self.running = ByRank()  # have blocks and a slot
        self.ready = ByRank()  # have blocks, wait for a slot
        self.waiting = ByRank()  # have nothing here
        self.frozen = ByRank()  # have blocks, and may go on elsewhere

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - self.running.num_choices

    @property
    def holders(self) -> Iterator[Sequence]:
        """Those whose blocks may be taken."""
        yield from self.running
        yield from self.ready

    @property
    def last_holder(self) -> Sequence | None:
        """In the order."""
        return max((s for s in (self.running.last, self.ready.last) if s), key=lambda s: s.rank, default=None)

    @property
    def idle_holder(self) -> Sequence | None:
        """One with blocks that may not run before those that run have ended: they must not wait for it."""
        return next((s for s in reversed(tuple(self.ready)) if not self.may_run(s)), None)

    def may_run(self, sequence: Sequence) -> bool:
        return self.is_open or sequence.has_run

    def sort(self) -> None:
        """By the ranks of this moment."""
        self._ranking.sort((self.running, self.ready, self.waiting))

    def run(self, sequence: Sequence) -> None:
        """Its wait is over."""
        self._remove(sequence)
        sequence.run(self._ranking.now_s)
        self._put(self.running, sequence)

    def run_apart(self, sequence: Sequence) -> None:
        """A new one, of choices that ran together."""
        self._put(self.running, sequence)

    def wait_ready(self, sequence: Sequence, since_s: float) -> None:
        """A new one, or one that was taken out."""
        sequence.wait(since_s)
        self._put(self.ready, sequence)

    def wait_empty(self, sequence: Sequence, since_s: float) -> None:
        sequence.wait(since_s)
        self._put(self.waiting, sequence)

    def leave_slot(self, sequence: Sequence) -> None:
        """From running to ready."""
        self.running.remove(sequence)
        self.wait_ready(sequence, self._ranking.now_s)

    def freeze(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._put(self.frozen, sequence)

    def thaw(self, sequence: Sequence) -> None:
        self.frozen.remove(sequence)
        self.wait_ready(sequence, self._ranking.now_s)

    def take_out(self, sequence: Sequence) -> None:
        self._remove(sequence)

    def drop_choice(self, sequence: Sequence, handle: int) -> None:
        """Of several; its rank may change."""
        place = self._remove(sequence)
        sequence.choices = tuple(choice for choice in sequence.choices if choice[1].handle != handle)
        self._put(place, sequence)

    def check(self, live: set[int]) -> None:
        """Raises AssertionError when something is out of its place. `live`: numbers of those that must be here."""
        everywhere = (*self.running, *self.ready, *self.waiting, *self.frozen)
        present = [sequence.number for sequence in everywhere]
        assert sorted(present) == sorted(live), f"sequences {present} are here, {live} are live"
        assert self.num_free_slots >= 0, f"{self.running.num_choices} running"
        assert not any(s.block_ids or s.spare_ids for s in self.waiting), "one waits with blocks"
        for place, waits in ((self.running, False), (self.ready, True), (self.waiting, True)):
            ranks = [sequence.rank for sequence in place]
            assert ranks == sorted(set(ranks)), f"ranks out of order, or not all different: {ranks}"
            assert all((sequence.waits_since_s is not None) == waits for sequence in place), "a wait is miscounted"

    def _put(self, place: ByRank, sequence: Sequence) -> None:
        sequence.rank = self._ranking.rank(sequence)
        place.add(sequence)

    def _remove(self, sequence: Sequence) -> ByRank:
        place = next(p for p in (self.running, self.ready, self.waiting, self.frozen) if sequence in p)
        place.remove(sequence)
        return place
