"""The work of a step for one sequence: its chunk, its draft tokens, the samples of its next tokens, and how it ends.
Pure.

`Speculation` uses only the step tokens and pool blocks that are left over: draft tokens preempt no sequence and never
exceed a sequence's maximum output.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from cluster.messages import FinishReason, Grammar, LogitRules, TokenStops
from cluster.request_size import blocks_for
from engine.sampling.logit_state import GrammarState, LogitState
from engine.scheduling.batching.block_tables import BlockTables
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.step import UNKNOWN_TOKEN, Chunk, ChunkBudget, DraftRequest, DrawnToken, Sample
from engine.speculation.drafter import Drafter

_NONE: frozenset[int] = frozenset()


def reaches_last_known(sequence: Sequence, num_tokens: int) -> bool:
    """Return whether a chunk of `num_tokens` reaches the last known token, so that the next token is drawn."""
    return sequence.num_computed + num_tokens == len(sequence.token_ids)


def chunk_of(
    sequence: Sequence,
    num_tokens: int,
    block_size: int,
    draft_tokens: tuple[int, ...] = (),
    draft: DraftRequest | None = None,
) -> Chunk:
    """Return a chunk of the next `num_tokens` known tokens and the draft tokens that may follow them."""
    start = sequence.num_computed
    end = start + num_tokens + len(draft_tokens)
    return Chunk(
        sequence_id=sequence.number,
        token_ids=(*sequence.token_ids[start : start + num_tokens], *draft_tokens),
        start=start,
        block_ids=sequence.block_ids[: blocks_for(end, block_size)],
        samples=_samples(sequence, draft_tokens) if reaches_last_known(sequence, num_tokens) else (),
        num_draft_tokens=len(draft_tokens),
        draft=draft,
    )


def until_finished(stops: TokenStops, drawn: SequenceOf[DrawnToken], num_output: int) -> SequenceOf[DrawnToken]:
    """Return the drawn tokens up to and including the one that ends the sequence. `num_output`: output tokens
    before."""
    for place, token in enumerate(drawn, start=1):
        if finish_reason(stops, token.token_id, num_output + place) is not None:
            return drawn[:place]
    return drawn


def finish_reason_of(sequence: Sequence) -> FinishReason | None:
    """Return why the sequence ends with its last token, or None if it continues."""
    return finish_reason(sequence.group.job.stops, sequence.token_ids[-1], sequence.num_output)


def banned_token_ids(stops: TokenStops, num_output: int) -> frozenset[int]:
    """Return the tokens that must not be drawn after `num_output` output tokens because of `min_tokens`."""
    return stops.stop_token_ids if num_output < stops.min_tokens else _NONE


def finish_reason(stops: TokenStops, token_id: int, num_output: int) -> FinishReason | None:
    """Return why a sequence ends with this token, its `num_output`-th (counted from 1), or None if it continues.

    Stop strings are the router's: they end a request there.
    """
    if token_id in stops.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= stops.max_tokens else None


def _samples(sequence: Sequence, draft_tokens: tuple[int, ...]) -> tuple[Sample, ...]:
    """Return one sample per choice; with draft tokens, one per draft token and one for the token after them."""
    job, known, num_output = sequence.group.job, len(sequence.token_ids), sequence.num_output
    state = None if job.sampling.rules is None else _logit_state(sequence, job.sampling.rules)
    grammar = None if job.grammar is None else _grammar_state(sequence, job.grammar)
    if not draft_tokens:
        banned = banned_token_ids(job.stops, num_output)
        return tuple(
            Sample(choice.seed, known, job.sampling, banned, state, (), grammar) for _, choice in sequence.choices
        )
    is_read = state is not None or grammar is not None
    ((_, choice),) = sequence.choices
    return tuple(
        Sample(
            choice.seed,
            known + place,
            job.sampling,
            banned_token_ids(job.stops, num_output + place),
            state,
            draft_tokens[:place] if is_read else (),
            grammar,
        )
        for place in range(len(draft_tokens) + 1)
    )


def _logit_state(sequence: Sequence, rules: LogitRules) -> LogitState:
    """Return the state that follows the sequence's tokens. Choices share it while they share a prompt."""
    if sequence.logit_state is None:
        sequence.logit_state = LogitState(rules, sequence.token_ids, sequence.group.num_prompt)
    return sequence.logit_state


def _grammar_state(sequence: Sequence, grammar: Grammar) -> GrammarState:
    """Return the state that follows the sequence's tokens. Choices share it while they share a prompt."""
    if sequence.grammar_state is None:
        sequence.grammar_state = GrammarState(grammar, sequence.token_ids, sequence.group.num_prompt)
    return sequence.grammar_state


NewDrafter = Callable[[], Drafter]


class Speculation:
    """Draft tokens of all sequences of a decode worker. Without `new_drafter`, speculation is off."""

    def __init__(self, new_drafter: NewDrafter | None, tables: BlockTables, block_size: int) -> None:
        self._new_drafter = new_drafter
        self._tables = tables
        self._block_size = block_size
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

    def chunk(
        self, sequence: Sequence, num_tokens: int, draft_tokens: tuple[int, ...], feeds: Mapping[int, int]
    ) -> Chunk:
        """Return the chunk of a sequence: its next `num_tokens` known tokens, and then draft tokens. `feeds`: by
        sequence, the sample of the step in flight that draws its unknown token."""
        draft = self._request(sequence) if reaches_last_known(sequence, num_tokens) else None
        chunk = chunk_of(sequence, num_tokens, self._block_size, draft_tokens, draft)
        is_fed = chunk.token_ids[-1] == UNKNOWN_TOKEN
        return replace(chunk, fed_by=feeds[sequence.number]) if is_fed else chunk

    def judge(self, sequence: Sequence, chunk: Chunk, drawn: SequenceOf[DrawnToken]) -> None:
        """Record how many draft tokens of a chunk were accepted: all of `drawn` but the last."""
        num_right = len(drawn) - 1
        self._num_draft_tokens += chunk.num_draft_tokens
        self._num_accepted += num_right
        self._drafter(sequence).judge(chunk.num_draft_tokens, num_right)

    def store(self, sequence: Sequence, draft_tokens: tuple[int, ...]) -> None:
        """Keep the draft tokens that follow the sequence's current tokens, for its next step."""
        self._drafter(sequence).store(len(sequence.token_ids), draft_tokens)

    def _request(self, sequence: Sequence) -> DraftRequest | None:
        """Return the request to the draft model of a sequence whose next token is drawn in this step."""
        if self._new_drafter is None or len(sequence.choices) > 1 or sequence.group.export is not None:
            return None
        return self._drafter(sequence).request(sequence.token_ids, max(1, self._num_decoding))

    def _drafter(self, sequence: Sequence) -> Drafter:
        if sequence.drafter is None:
            assert self._new_drafter is not None
            sequence.drafter = self._new_drafter()
        return sequence.drafter
