"""What a decoding sequence guesses next. Owns the seam between schedulers and the ways to guess. Pure.

A guess costs one more row in a step and is never believed: the step draws the token of its position as ever, and the
guess counts only if it is that token (`engine/steps/runner.py`). So a drafter may be wrong, or silent, but never
harmful.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.scheduling.step import DraftRequest
from engine.speculation.acceptance import Acceptance


class Drafter(Protocol):
    """Of one sequence, which it sees grow."""

    def propose(self, token_ids: Sequence[int], max_guesses: int) -> tuple[int, ...]:
        """Guesses at what follows `token_ids`, all known tokens of the sequence: what it was called with before is
        their beginning. None at all where it has nothing to say."""
        ...


class Guesser(Protocol):
    """What a scheduler keeps with each sequence that decodes. In every step of it: `propose`, `request`, and with the
    step's outcome `judge`, then `take`."""

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        """Guesses for the step that is being planned, at most `limit`: what the sequence may still grow by, less the
        one token that the step draws in any case. So many sequences decode in it."""
        ...

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        """What the chunk asks the runner's draft model for; None where guesses come from elsewhere."""
        ...

    def judge(self, num_guesses: int, num_right: int) -> None:
        """So many guesses were in the step, so many of them were drawn."""
        ...

    def take(self, num_known: int, guesses: tuple[int, ...]) -> None:
        """What the runner drafted behind the first `num_known` tokens, those just drawn included."""
        ...


class TextGuesser:
    """Guesses by a Drafter that looks at the tokens alone."""

    def __init__(self, drafter: Drafter, acceptance: Acceptance) -> None:
        self._drafter = drafter
        self._acceptance = acceptance

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        wanted = min(limit, self._acceptance.num_guesses(num_sequences))
        guesses = self._drafter.propose(token_ids, wanted) if wanted > 0 else ()
        if limit > 0 and not wanted:
            self._acceptance.rest()
        return guesses

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        return None

    def judge(self, num_guesses: int, num_right: int) -> None:
        self._acceptance.observe(num_guesses, num_right)

    def take(self, num_known: int, guesses: tuple[int, ...]) -> None:
        raise AssertionError("nobody was asked to draft")


class DraftedGuesser:
    """Holds what the runner's draft model guessed at the end of the last step, until the next one is planned."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._num_known = 0
        self._guesses: tuple[int, ...] = ()

    def propose(self, token_ids: Sequence[int], limit: int, num_sequences: int) -> tuple[int, ...]:
        """Nothing where the sequence has grown since without the draft model."""
        return self._guesses[: max(0, limit)] if len(token_ids) == self._num_known else ()

    def request(self, token_ids: list[int], num_sequences: int) -> DraftRequest | None:
        num_guesses = self._acceptance.num_guesses(num_sequences)
        if not num_guesses:
            self._acceptance.rest()
            return None
        return DraftRequest(token_ids, num_guesses)

    def judge(self, num_guesses: int, num_right: int) -> None:
        self._acceptance.observe(num_guesses, num_right)

    def take(self, num_known: int, guesses: tuple[int, ...]) -> None:
        self._num_known, self._guesses = num_known, guesses
