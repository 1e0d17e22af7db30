"""Adds draft tokens to the chunks of decoding sequences and counts how many were accepted. Pure. Owned by the decode
scheduler.

Draft tokens use only the step tokens and pool blocks that are left over: they preempt no sequence and never exceed a
sequence's maximum output. The blocks of rejected draft tokens are returned when the step has ended.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.step import Chunk, ChunkBudget, DraftRequest, DrawnToken
from engine.speculation.drafter import Drafter

NewDrafter = Callable[[], Drafter]


class Speculation:
    """Draft tokens of all sequences of a decode worker. Without `new_drafter`, speculation is off."""

    def __init__(self, new_drafter: NewDrafter | None, tables: BlockTables) -> None:
        self._new_drafter = new_drafter
        self._tables = tables
        self._num_decoding = 0  # in the step that is planned
        self._num_draft_tokens = 0
        self._num_accepted = 0

    @property
    def is_off(self) -> bool:
        return self._new_drafter is None

    @property
    def figures(self) -> dict[str, int]:
        return {"draft_tokens": self._num_draft_tokens, "draft_tokens_accepted": self._num_accepted}

    def propose(
        self, sequences: Iterable[Sequence], budget: ChunkBudget, num_spare_blocks: int
    ) -> dict[int, tuple[int, ...]]:
        """Return draft tokens by sequence number, with blocks already reserved. Sequences that still share their last
        block with other choices get none."""
        draft_tokens: dict[int, tuple[int, ...]] = {}
        sequences = tuple(sequences)
        self._num_decoding = len(sequences)
        if self._new_drafter is None:
            return draft_tokens
        for sequence in sequences:
            if len(sequence.choices) > 1 or not budget.left:
                continue
            room = self._tables.num_free_places(sequence, num_spare_blocks)
            limit = min(room, budget.left, sequence.num_output_left - 1)
            if limit < 1:
                continue
            proposed = self._drafter(sequence).propose(sequence.token_ids, limit, len(sequences))
            if proposed:
                num_spare_blocks -= self._tables.grow_for_draft_tokens(sequence, len(proposed))
                budget.take(len(proposed))
                draft_tokens[sequence.number] = proposed
        return draft_tokens

    def request(self, sequence: Sequence) -> DraftRequest | None:
        """Return the request to the draft model of a sequence whose next token is drawn in this step."""
        if self._new_drafter is None or len(sequence.choices) > 1 or sequence.group.export is not None:
            return None
        return self._drafter(sequence).request(sequence.token_ids, max(1, self._num_decoding))

    def judge(self, sequence: Sequence, chunk: Chunk, drawn: SequenceOf[DrawnToken]) -> None:
        """Record how many draft tokens of a chunk were accepted: all of `drawn` but the last."""
        num_right = len(drawn) - 1
        self._num_draft_tokens += chunk.num_draft_tokens
        self._num_accepted += num_right
        self._drafter(sequence).judge(chunk.num_draft_tokens, num_right)

    def store(self, sequence: Sequence, draft_tokens: tuple[int, ...]) -> None:
        """Keep the draft tokens that follow the sequence's current tokens, for its next step."""
        self._drafter(sequence).store(len(sequence.token_ids), draft_tokens)

    def _drafter(self, sequence: Sequence) -> Drafter:
        if sequence.drafter is None:
            assert self._new_drafter is not None
            sequence.drafter = self._new_drafter()
        return sequence.drafter
