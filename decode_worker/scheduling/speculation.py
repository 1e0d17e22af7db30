"""Guesses in the chunks of decoding sequences: how many there is room for, and what became of them. Pure. Owned by the
decode scheduler.

A guess preempts nobody: it takes what a step and the pool have to spare, and is never past what a sequence may put out.
What a wrong one took is given back with the step's outcome.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from decode_worker.scheduling.block_tables import BlockTables
from decode_worker.scheduling.sequences import Sequence
from engine.scheduling.schedule import ChunkBudget
from engine.scheduling.step import Chunk, DraftRequest, DrawnToken
from engine.speculation.drafter import Guesser

NewGuesser = Callable[[], Guesser]


class Speculation:
    """`new_guesser`: None where nothing is guessed."""

    def __init__(self, new_guesser: NewGuesser | None, tables: BlockTables) -> None:
        self._new_guesser = new_guesser
        self._tables = tables
        self._num_decoding = 0  # in the step that is planned
        self._num_guesses = 0
        self._num_accepted = 0

    @property
    def is_off(self) -> bool:
        return self._new_guesser is None

    @property
    def figures(self) -> dict[str, int]:
        return {"guesses": self._num_guesses, "guesses_accepted": self._num_accepted}

    def propose(
        self, sequences: Iterable[Sequence], budget: ChunkBudget, num_spare_blocks: int
    ) -> dict[int, tuple[int, ...]]:
        """By sequence number, for decoding ones whose tails are their own. They have the blocks for them."""
        guesses: dict[int, tuple[int, ...]] = {}
        sequences = tuple(sequences)
        self._num_decoding = len(sequences)
        if self._new_guesser is None:
            return guesses
        for sequence in sequences:
            if len(sequence.choices) > 1 or not budget.left:
                continue
            room = self._tables.num_free_places(sequence, num_spare_blocks)
            limit = min(room, budget.left, sequence.num_output_left - 1)
            if limit < 1:
                continue
            proposed = self._guesser(sequence).propose(sequence.token_ids, limit, len(sequences))
            if proposed:
                num_spare_blocks -= self._tables.grow_for_guesses(sequence, len(proposed))
                budget.take(len(proposed))
                guesses[sequence.number] = proposed
        return guesses

    def request(self, sequence: Sequence) -> DraftRequest | None:
        """Of a sequence whose next token is drawn in this step."""
        if self._new_guesser is None or len(sequence.choices) > 1:
            return None
        return self._guesser(sequence).request(sequence.token_ids, max(1, self._num_decoding))

    def judge(self, sequence: Sequence, chunk: Chunk, drawn: SequenceOf[DrawnToken]) -> None:
        """What a chunk with guesses came to."""
        num_right = len(drawn) - 1
        self._num_guesses += chunk.num_guesses
        self._num_accepted += num_right
        self._guesser(sequence).judge(chunk.num_guesses, num_right)

    def take(self, sequence: Sequence, guesses: tuple[int, ...]) -> None:
        """What the runner drafted behind the tokens that the sequence has now."""
        self._guesser(sequence).take(len(sequence.token_ids), guesses)

    def _guesser(self, sequence: Sequence) -> Guesser:
        if sequence.guesser is None:
            assert self._new_guesser is not None
            sequence.guesser = self._new_guesser()
        return sequence.guesser
