"""A sequence's part of a step, and what is drawn for it. Pure."""

from collections.abc import Sequence as SequenceOf

from cluster.messages import FinishReason, TokenStops
from decode_worker.scheduling.sequences import Sequence
from engine.scheduling.schedule import blocks_for
from engine.scheduling.step import Chunk, DraftRequest, DrawnToken, Sample
from engine.scheduling.stops import banned_token_ids, finish_reason


def ends_known(sequence: Sequence, num_tokens: int) -> bool:
    """Whether so many more tokens are all that are known: then the next one is drawn."""
    return sequence.num_computed + num_tokens == len(sequence.token_ids)


def chunk_of(
    sequence: Sequence,
    num_tokens: int,
    block_size: int,
    guesses: tuple[int, ...] = (),
    draft: DraftRequest | None = None,
) -> Chunk:
    """The next `num_tokens` known tokens, and guesses at what follows the last of them."""
    start = sequence.num_computed
    end = start + num_tokens + len(guesses)
    return Chunk(
        sequence_id=sequence.number,
        token_ids=(*sequence.token_ids[start : start + num_tokens], *guesses),
        start=start,
        block_ids=sequence.block_ids[: blocks_for(end, block_size)],
        samples=_samples(sequence, len(guesses)) if ends_known(sequence, num_tokens) else (),
        num_guesses=len(guesses),
        draft=draft,
    )


def up_to_the_end(stops: TokenStops, drawn: SequenceOf[DrawnToken], num_output: int) -> SequenceOf[DrawnToken]:
    """Of tokens drawn behind `num_output` others, those up to the one that ends the sequence."""
    for place, token in enumerate(drawn, start=1):
        if finish_reason(stops, token.token_id, num_output + place) is not None:
            return drawn[:place]
    return drawn


def reason_of(sequence: Sequence) -> FinishReason | None:
    """Why it ends with its last token, if it does."""
    return finish_reason(sequence.group.job.stops, sequence.token_ids[-1], sequence.num_output)


def _samples(sequence: Sequence, num_guesses: int) -> tuple[Sample, ...]:
    """Of every choice, or of every guess and of what follows them."""
    job, known, num_output = sequence.group.job, len(sequence.token_ids), sequence.num_output
    if not num_guesses:
        banned = banned_token_ids(job.stops, num_output)
        return tuple(Sample(choice.seed, known, job.sampling, banned) for _, choice in sequence.choices)
    ((_, choice),) = sequence.choices
    return tuple(
        Sample(choice.seed, known + place, job.sampling, banned_token_ids(job.stops, num_output + place))
        for place in range(num_guesses + 1)
    )
