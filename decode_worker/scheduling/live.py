"""The sequences that have not ended, by router and handle, with their groups and deadlines. Pure. Owned by the decode
scheduler."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

from cluster.messages import DecodeJob, FinishReason, MemberId, SequenceStart
from cluster.protocol.hashing import BlockChain
from decode_worker.scheduling.sequences import Group, Sequence
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.length_prediction import LengthPredictor

Choices = tuple[tuple[int, SequenceStart], ...]


class LiveSequences:
    """`lengths` learns from every choice that ends, and predicts those that begin."""

    def __init__(self, lengths: LengthPredictor | None) -> None:
        self._lengths = lengths
        self._sequences: dict[tuple[MemberId, int], Sequence] = {}  # one of several choices is under several handles
        self._groups: dict[int, Group] = {}
        self._deadlines: Deadlines[int] = Deadlines()  # by group number
        self.numbers = count()

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def __contains__(self, key: tuple[MemberId, int]) -> bool:
        return key in self._sequences

    def names(self) -> Iterable[tuple[MemberId, int]]:
        """Routers and handles."""
        return self._sequences.keys()

    def get(self, router: MemberId, handle: int) -> Sequence | None:
        return self._sequences.get((router, handle))

    def due(self, now_s: float) -> Iterator[Group]:
        """Those past their deadlines."""
        for number in self._deadlines.due(now_s):
            yield self._groups[number]

    def of_group(self, group: Group) -> dict[int, Sequence]:
        """By handle."""
        return {handle: sequence for (_, handle), sequence in self._sequences.items() if sequence.group is group}

    def new_group(self, number: int, job: DecodeJob, now_s: float) -> Group:
        group = self._groups[number] = Group(number, job, now_s, num_live=0)
        self._deadlines.add(number, now_s + job.timeout_s)
        return group

    def new_sequence(self, group: Group, choices: Choices, chain: BlockChain) -> Sequence:
        """Of choices that go on from the same tokens. They are live from here on."""
        token_ids = list(group.job.prompt_token_ids + choices[0][1].committed_token_ids)
        sequence = Sequence(next(self.numbers), group, choices, token_ids, chain)
        self.predict(sequence)
        group.num_live += len(choices)
        for _, start in choices:
            self._sequences[group.job.router, start.handle] = sequence
        return sequence

    def part(self, sequence: Sequence) -> None:
        """It is the one of its only choice from now on."""
        self._sequences[sequence.group.job.router, sequence.choices[0][1].handle] = sequence

    def rename(self, sequence: Sequence, new_handle: int) -> None:
        """Of a sequence with one choice."""
        router, ((index, start),) = sequence.group.job.router, sequence.choices
        sequence.choices = ((index, replace(start, handle=new_handle)),)
        del self._sequences[router, start.handle]
        self._sequences[router, new_handle] = sequence

    def predict(self, sequence: Sequence) -> None:
        """At its beginning, and again when it outlives what was predicted."""
        if self._lengths is not None and sequence.num_output >= sequence.predicted_tokens:
            job = sequence.group.job
            known = len(job.prompt_token_ids), sequence.num_output
            sequence.predicted_tokens = self._lengths.predict(job.cache_salt, *known, job.stops.max_tokens)

    def end(self, router: MemberId, handle: int, reason: FinishReason | None) -> Sequence | None:
        """Of one choice, by its own tokens or not. Answers what it was a choice of; None when it had ended."""
        sequence = self._sequences.pop((router, handle), None)
        if sequence is None:
            return None
        group, job = sequence.group, sequence.group.job
        if self._lengths is not None:
            was_cut = reason is not FinishReason.STOP
            self._lengths.observe(job.cache_salt, len(job.prompt_token_ids), sequence.num_output, was_cut=was_cut)
        group.num_live -= 1
        if group.num_live == 0:
            del self._groups[group.number]
            self._deadlines.discard(group.number)
        return sequence

    def check(self) -> set[int]:
        """Raises AssertionError when groups and sequences disagree. Answers the numbers of all sequences."""
        num_live = sum(group.num_live for group in self._groups.values())
        assert num_live == len(self._sequences), f"groups count {num_live} live choices of {len(self._sequences)}"
        return {sequence.number for sequence in self._sequences.values()}
