"""What the decode scheduler knows about its sequences. Pure. Owned by the scheduler alone.

A sequence carries several choices only while the prompt that they share is being prefilled here: with the prompt's last
chunk every choice draws its own token and becomes a sequence of its own.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster.messages import DecodeJob, SequenceStart
from cluster.protocol.hashing import BlockChain
from engine.scheduling.policies import Rank
from engine.speculation.drafter import Guesser


@dataclass(slots=True, eq=False)
class Group:
    """One job. `number` counts arrivals: a hand-off arrives with its Reserve."""

    number: int
    job: DecodeJob
    admitted_s: float
    num_live: int  # choices that have not ended


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where the KV of a preempted sequence is: its first blocks are shared and will be found again, the others lie in
    slots of host memory."""

    first: int
    slots: tuple[int, ...]
    unverified: set[int] = field(default_factory=set)  # places among its blocks whose KV was not verified


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids`: prompt, committed and drawn tokens; while a step is planned ahead also one that is not known. KV of
    the first `num_computed` of them is in `block_ids`, or swapped out."""

    number: int  # the runner's name for it
    group: Group
    choices: tuple[tuple[int, SequenceStart], ...]  # (index in the job, start)
    token_ids: list[int]
    chain: BlockChain  # names of its full blocks
    num_computed: int = 0
    num_kept: int = 0  # leading blocks that are sealed and in the prefix cache
    num_cached: int = 0  # leading tokens whose KV was here before it
    block_ids: tuple[int, ...] = ()
    # Set aside for private copies of a shared tail: one per further choice before they part, then at most the own.
    spare_ids: tuple[int, ...] = ()
    swapped: Swapped | None = None  # only while it waits
    has_run: bool = False  # has been in a step; if it waits, its place was taken
    num_flights: int = 0  # steps under way that it is in
    is_over: bool = False  # ended; what a step under way brings of it is dropped
    rank: Rank = ()  # as it stands in its place; less goes first
    predicted_tokens: int = 0  # of output, all that it will have; 0: unknown
    guesser: Guesser | None = None  # once it has guessed
    # What policies ask for (engine.scheduling.policies.Work).
    num_done: int = 0  # most tokens that were ever computed of it
    num_done_waiting: int = 0  # of them, those computed before its last wait ended
    waits_since_s: float | None = None  # None while it runs
    waited_s: float = 0.0  # the wait before it ran

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed: 1 while it decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.group.job.prompt_token_ids)

    @property
    def num_output_left(self) -> int:
        return self.group.job.stops.max_tokens - self.num_output

    def advance(self, num_tokens: int) -> None:
        """So many more are computed."""
        self.num_computed += num_tokens
        self.num_done = max(self.num_done, self.num_computed)

    def wait(self, now_s: float) -> None:
        self.waits_since_s = now_s

    def run(self, now_s: float) -> None:
        """Its wait is over."""
        assert self.waits_since_s is not None
        self.waited_s, self.waits_since_s, self.num_done_waiting = now_s - self.waits_since_s, None, self.num_done

    def parted(self, number: int, choice: tuple[int, SequenceStart], spare_ids: tuple[int, ...]) -> "Sequence":
        """One that goes on apart with this choice of it, on the same blocks."""
        assert not self.num_flights
        return replace(
            self,
            number=number,
            choices=(choice,),
            token_ids=list(self.token_ids),
            chain=self.chain.copy(),
            num_cached=0,
            spare_ids=spare_ids,
            guesser=None,
        )


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


@dataclass(slots=True, eq=False)
class ByRank:
    """Sequences, the one that goes first first."""

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
    def num_choices(self) -> int:
        return sum(len(sequence.choices) for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def sort(self, rank: Callable[[Sequence], Rank]) -> None:
        """Anew, by the ranks of this moment."""
        for sequence in self._sequences:
            sequence.rank = rank(sequence)
        self._sequences.sort(key=_rank)
