"""Drafters: each proposes the draft tokens of one decoding sequence, as many as its acceptance rate makes pay. Pure.

A draft token adds one row to a step. The step draws every position as it would without speculation and accepts a draft
token only if it equals the drawn token (`engine/steps/runner.py`), so a wrong draft token costs time and never changes
the output.

If each draft token is accepted with probability a, independently, k of them yield (1 - a^(k+1)) / (1 - a) tokens per
step (Leviathan et al. 2023). The step then takes 1 + k * cost times as long as without any. The best k follows. The
cost is that of one more row against the whole step, so it grows with the number of sequences in the step.

Prompt lookup decoding (Saxena 2023) needs no model and pays where text repeats: quoted prompts, code, tables, loops.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.settings.worker_settings import EngineSettings
from engine.scheduling.step import DraftRequest

_MAX_INDEXED = 1 << 16  # positions; a full index is cleared, which bounds its memory to twice this
_MAX_LOOKED_AT = 8  # candidate positions per call, newest first
_MEMORY = 32.0  # after this many draft tokens an observation weighs a third
_PRIOR_RATE, _PRIOR_WEIGHT = 0.8, 4.0  # high, because a rejected draft token costs less than a missed one would save
_REST = 16  # steps without draft tokens, until one is tried again


class TokenProposer(Protocol):
    """Proposes draft tokens from the token ids of one sequence alone."""

    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        """Return at most `max_draft_tokens` tokens that may follow `token_ids`, or none.

        `token_ids` are all known tokens of the sequence; every call extends those of the call before.
        """
        ...


class Drafter(Protocol):
    """Proposes the draft tokens of one decoding sequence. A scheduler keeps one for each.

    Each step calls `propose` and `request` when it is planned, and `judge`, then `store`, with its outcome.
    """

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        """Return at most `limit` draft tokens for the step being planned, in which `num_sequences` sequences decode.

        `limit` leaves out the one token that the step draws in any case.
        """
        ...

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        """Return the chunk's request to the runner's draft model, or None if draft tokens need no model."""
        ...

    def judge(self, num_draft_tokens: int, num_right: int) -> None:
        """Record that a step held `num_draft_tokens` draft tokens and accepted the first `num_right` of them."""
        ...

    def store(self, num_known: int, draft_tokens: tuple[int, ...]) -> None:
        """Keep the draft model's tokens for the next step. They follow the first `num_known` tokens of the sequence."""
        ...


class Acceptance:
    """The acceptance rate of one sequence, with old observations weighing less."""

    def __init__(self, max_draft_tokens: int, fixed_rows: float) -> None:
        """`fixed_rows` is the fixed part of a step's time, as a number of rows (`engine/timing/steps_at_load.py`)."""
        assert max_draft_tokens >= 0
        self._max_draft_tokens = max_draft_tokens
        self._fixed_rows = fixed_rows
        self._right = _PRIOR_RATE * _PRIOR_WEIGHT
        self._judged = _PRIOR_WEIGHT
        self._resting = 0

    @property
    def rate(self) -> float:
        """The estimated probability that a draft token is accepted, given that those before it were."""
        return self._right / self._judged

    def num_draft_tokens(self, num_sequences: int) -> int:
        """Return how many draft tokens to propose for a step in which `num_sequences` sequences decode."""
        if self._resting >= _REST:
            return min(1, self._max_draft_tokens)
        cost = num_sequences / (num_sequences + self._fixed_rows)
        return best_num_draft_tokens(self.rate, self._max_draft_tokens, cost)

    def observe(self, num_draft_tokens: int, num_right: int) -> None:
        """Record a step in which the first `num_right` draft tokens were accepted.

        Only one more was compared: draft tokens after the first rejected one count neither way.
        """
        assert 0 <= num_right <= num_draft_tokens
        judged = min(num_draft_tokens, num_right + 1)
        kept = (1 - 1 / _MEMORY) ** judged
        self._right = self._right * kept + num_right
        self._judged = self._judged * kept + judged
        if num_draft_tokens:
            self._resting = 0

    def rest(self) -> None:
        """Record a step that got no draft tokens because none would have paid."""
        self._resting += 1


def tokens_per_step(rate: float, num_draft_tokens: int) -> float:
    """Return the expected tokens of a step with `num_draft_tokens` draft tokens: the accepted ones and one more."""
    return float(sum(rate**index for index in range(num_draft_tokens + 1)))


def best_num_draft_tokens(rate: float, max_draft_tokens: int, cost: float) -> int:
    """Return the number of draft tokens with the most tokens per second; 0 if speculation does not pay.

    `cost` is the time of one draft token as a share of a step without any.
    """
    return max(range(max_draft_tokens + 1), key=lambda count: tokens_per_step(rate, count) / (1 + cost * count))


class PromptLookup:
    """The TokenProposer of one sequence. Indexes each token once and compares a bounded number of positions per call.

    Proposes the tokens that followed the position whose preceding tokens match the end of the sequence the longest, up
    to `max_ngram` and at least `min_ngram` tokens; among equals the newest.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 8) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram of min_ngram tokens -> the newest position after it
        self._older: dict[int, int] = {}  # position after an n-gram -> the previous position after the same n-gram
        self._first_indexed = 0
        self._num_indexed = 0  # n-grams that end at or before this position are in the index

    def propose(self, token_ids: Sequence[int], max_draft_tokens: int) -> tuple[int, ...]:
        num_known = len(token_ids)
        self._index(token_ids)
        if max_draft_tokens < 1 or num_known <= self._min_ngram:
            return ()
        place = self._best_place(token_ids)
        if place is None:
            return ()
        # Fewer than max_draft_tokens tokens follow the place: repeat them, as a text in a loop does.
        period = num_known - place
        return tuple(token_ids[place + index % period] for index in range(max_draft_tokens))

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index all n-grams except the last one of the sequence, which no token follows yet."""
        begin = max(self._num_indexed + 1, self._min_ngram, len(token_ids) - _MAX_INDEXED)
        if begin - self._first_indexed > _MAX_INDEXED:
            self._newest, self._older, self._first_indexed = {}, {}, begin
        for end in range(begin, len(token_ids)):
            ngram = tuple(token_ids[end - self._min_ngram : end])
            earlier = self._newest.get(ngram)
            if earlier is not None:
                self._older[end] = earlier
            self._newest[ngram] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)

    def _best_place(self, token_ids: Sequence[int]) -> int | None:
        """Return the position whose preceding tokens match the end of the sequence the longest, or None."""
        place = self._newest.get(tuple(token_ids[-self._min_ngram :]))
        best, longest = None, 0
        for _ in range(_MAX_LOOKED_AT):
            if place is None:
                break
            agreed = self._agreement(token_ids, place)
            if agreed > longest:
                best, longest = place, agreed
            place = self._older.get(place)
        return best

    def _agreement(self, token_ids: Sequence[int], place: int) -> int:
        most = min(self._max_ngram, place)
        return next((n for n in range(most) if token_ids[place - 1 - n] != token_ids[-1 - n]), most)


class TextDrafter:
    """Draft tokens from a TokenProposer."""

    def __init__(self, proposer: TokenProposer, acceptance: Acceptance) -> None:
        self._proposer = proposer
        self._acceptance = acceptance

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        wanted = min(limit, self._acceptance.num_draft_tokens(num_sequences))
        draft_tokens = self._proposer.propose(token_ids, wanted) if wanted > 0 else ()
        if limit > 0 and not wanted:
            self._acceptance.rest()
        return draft_tokens

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        return None

    def judge(self, num_draft_tokens: int, num_right: int) -> None:
        self._acceptance.observe(num_draft_tokens, num_right)

    def store(self, num_known: int, draft_tokens: tuple[int, ...]) -> None:
        raise AssertionError("no draft was requested")


class ModelDrafter:
    """Draft tokens from the runner's draft model, kept from the end of one step until the next one is planned."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._num_known = 0
        self._draft_tokens: tuple[int, ...] = ()

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        """Return the stored draft tokens, or none if the sequence has grown since they were computed."""
        return self._draft_tokens[: max(0, limit)] if len(token_ids) == self._num_known else ()

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        num_draft_tokens = self._acceptance.num_draft_tokens(num_sequences)
        if not num_draft_tokens:
            self._acceptance.rest()
            return None
        return DraftRequest(token_ids, num_draft_tokens)

    def judge(self, num_draft_tokens: int, num_right: int) -> None:
        self._acceptance.observe(num_draft_tokens, num_right)

    def store(self, num_known: int, draft_tokens: tuple[int, ...]) -> None:
        self._num_known, self._draft_tokens = num_known, draft_tokens


def drafter_factory(settings: EngineSettings, measure: Callable[[], float]) -> Callable[[], Drafter] | None:
    """Return a function that makes the drafter of one sequence, or None if speculation is off.

    `measure` returns the `fixed_rows` of Acceptance; it is called at most once, and only if speculation is on.
    """
    if settings.speculation == "off":
        return None
    num_draft_tokens, fixed_rows = settings.num_draft_tokens, measure()
    if settings.speculation == "draft":
        return lambda: ModelDrafter(Acceptance(num_draft_tokens, fixed_rows))
    return lambda: TextDrafter(PromptLookup(), Acceptance(num_draft_tokens, fixed_rows))
