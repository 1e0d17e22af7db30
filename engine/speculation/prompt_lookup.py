"""Guesses from a sequence's own text: what followed the last time its newest tokens stood there. Pure.

(Prompt look-up decoding, Saxena 2023.) It costs no model; it finds what repeats: quoted prompts, code, tables, loops.
"""

from collections.abc import Sequence

_MAX_INDEXED = 1 << 16  # positions; after so many the index begins anew: its memory has a bound, twice this
_MAX_LOOKED_AT = 8  # places that end in the same n-gram, newest first


class PromptLookup:
    """A Drafter of one sequence. Indexes each token once; looks at a bounded number of places per call.

    The place whose preceding tokens agree the longest (up to `max_ngram`) is continued, the newest among equals. At
    least `min_ngram` tokens must agree.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 8) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram of the shortest kind -> the position after it
        self._older: dict[int, int] = {}  # position after an n-gram -> position after the same one, earlier
        self._first_indexed = 0
        self._num_indexed = 0  # of the tokens: n-grams that end before this position are in the index

    def propose(self, token_ids: Sequence[int], max_guesses: int) -> tuple[int, ...]:
        num_known = len(token_ids)
        self._index(token_ids)
        if max_guesses < 1 or num_known <= self._min_ngram:
            return ()
        place = self._best_place(token_ids)
        if place is None:
            return ()
        # A place so near the end that it reaches into the guesses: they go round, as a loop does.
        period = num_known - place
        return tuple(token_ids[place + index % period] for index in range(max_guesses))

    def _index(self, token_ids: Sequence[int]) -> None:
        """All n-grams but the one that ends the sequence: nothing follows it yet."""
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
        """The position whose preceding tokens agree the longest with the sequence's end."""
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
