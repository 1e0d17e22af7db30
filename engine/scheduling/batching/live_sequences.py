"""The table of live sequences, with their deadlines and predicted lengths. Pure. Owned by the scheduler.

Sequences that are decoded here are found by router and handle, exports by their ticket.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

from cluster.messages import DecodeJob, FinishReason, MemberId, PrefillJob, SequenceStart
from cluster.protocol.hashing import BlockChain
from engine.scheduling.batching.sequences import Export, Group, Sequence
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.schedule import Deadlines

Choices = tuple[tuple[int, SequenceStart], ...]


class LiveSequences:
    """`lengths` records the output length of each choice that ends and predicts that of new ones."""

    def __init__(self, lengths: LengthPredictor | None) -> None:
        self._lengths = lengths
        # A sequence with several choices has one entry per handle.
        self._sequences: dict[tuple[MemberId, int], Sequence] = {}
        self._exports: dict[bytes, Sequence] = {}
        self._groups: dict[int, Group] = {}
        self._deadlines: Deadlines[int] = Deadlines()  # by group number
        self._numbers = count()
        self._arrivals = count()

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def __contains__(self, key: tuple[MemberId, int]) -> bool:
        return key in self._sequences

    def names(self) -> Iterable[tuple[MemberId, int]]:
        """Return the router and the handle of every live choice that is decoded here."""
        return self._sequences.keys()

    @property
    def tickets(self) -> Iterable[bytes]:
        """The tickets of all live exports."""
        return self._exports.keys()

    def get(self, router: MemberId, handle: int) -> Sequence | None:
        return self._sequences.get((router, handle))

    def get_export(self, ticket_id: bytes) -> Sequence | None:
        return self._exports.get(ticket_id)

    def due(self, now_s: float) -> Iterator[Group]:
        """Yield the groups whose deadline has passed."""
        for number in self._deadlines.due(now_s):
            yield self._groups[number]

    def of_group(self, group: Group) -> dict[int, Sequence]:
        """Return the live sequences of a group by handle."""
        return {handle: sequence for (_, handle), sequence in self._sequences.items() if sequence.group is group}

    def next_arrival(self) -> int:
        """Return the number of a group or a hand-off that arrives now."""
        return next(self._arrivals)

    def new_group(self, number: int, job: DecodeJob, now_s: float) -> Group:
        return self._add_group(Group(number, job, len(job.prompt_token_ids), now_s))

    def new_sequence(self, group: Group, choices: Choices, chain: BlockChain) -> Sequence:
        """Create a sequence for choices that continue from the same tokens, and list its choices as live."""
        assert isinstance(group.job, DecodeJob)
        token_ids = list(group.job.prompt_token_ids + choices[0][1].committed_token_ids)
        sequence = Sequence(next(self._numbers), group, choices, token_ids, chain, num_slots=len(choices))
        self.predict(sequence)
        group.num_live += len(choices)
        for _, start in choices:
            self._sequences[group.router, start.handle] = sequence
        return sequence

    def new_export(self, export: Export, job: PrefillJob, chain: BlockChain, now_s: float) -> Sequence:
        """Create the sequence of an export and list it as live."""
        num_prompt = len(job.token_ids) - job.num_committed
        group = self._add_group(Group(self.next_arrival(), job, num_prompt, now_s, num_live=1, export=export))
        choices = tuple((index, SequenceStart(handle=index, seed=seed)) for index, seed in enumerate(job.seeds))
        sequence = Sequence(next(self._numbers), group, choices, list(job.token_ids), chain, num_slots=1)
        self._exports[export.ticket_id] = sequence
        return sequence

    def new_number(self) -> int:
        """Return the number of a sequence that is split off."""
        return next(self._numbers)

    def add_split(self, sequence: Sequence) -> None:
        """List a sequence that was split off under the handle of its only choice."""
        self._sequences[sequence.group.router, sequence.choices[0][1].handle] = sequence

    def rename(self, sequence: Sequence, new_handle: int) -> None:
        """Change the handle of a sequence with one choice."""
        router, ((index, start),) = sequence.group.router, sequence.choices
        sequence.choices = ((index, replace(start, handle=new_handle)),)
        del self._sequences[router, start.handle]
        self._sequences[router, new_handle] = sequence

    def predict(self, sequence: Sequence) -> None:
        """Predict its output length, if it has no prediction or has exceeded it."""
        if self._lengths is not None and sequence.num_output >= sequence.predicted_tokens:
            group, job = sequence.group, sequence.group.job
            known = group.num_prompt, sequence.num_output
            sequence.predicted_tokens = self._lengths.predict(job.cache_salt, *known, job.stops.max_tokens)

    def end(self, router: MemberId, handle: int, reason: FinishReason | None) -> Sequence | None:
        """Remove a choice. `reason`: why it finished; None if it was cancelled or failed. Return the sequence that it
        was a choice of, or None if it had ended before."""
        sequence = self._sequences.pop((router, handle), None)
        if sequence is None:
            return None
        if self._lengths is not None:
            was_cut = reason is not FinishReason.STOP
            salt, num_prompt = sequence.group.job.cache_salt, sequence.group.num_prompt
            self._lengths.observe(salt, num_prompt, sequence.num_output, was_cut=was_cut)
        self._end_choice(sequence.group)
        return sequence

    def end_export(self, ticket_id: bytes) -> Sequence | None:
        """Remove an export. Return its sequence, or None if it had ended before."""
        sequence = self._exports.pop(ticket_id, None)
        if sequence is not None:
            self._end_choice(sequence.group)
        return sequence

    def check(self) -> set[int]:
        """Raise AssertionError if groups and sequences disagree. Return the numbers of all sequences."""
        num_live = sum(group.num_live for group in self._groups.values())
        num_listed = len(self._sequences) + len(self._exports)
        assert num_live == num_listed, f"groups count {num_live} live choices of {num_listed}"
        return {sequence.number for sequence in (*self._sequences.values(), *self._exports.values())}

    def _add_group(self, group: Group) -> Group:
        self._groups[group.number] = group
        self._deadlines.add(group.number, group.admitted_s + group.job.timeout_s)
        return group

    def _end_choice(self, group: Group) -> None:
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[group.number]
            self._deadlines.discard(group.number)
