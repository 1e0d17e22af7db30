"""Draft tokens from the sequence itself: the tokens that followed the last occurrence of its newest tokens. Pure.

Prompt look-up decoding (Saxena 2023) needs no model and pays where text repeats: quoted prompts, code, tables, loops.
"""

from collections.abc import Sequence

_MAX_INDEXED = 1 << 16  # positions; a full index is cleared, which bounds its memory to twice this
_MAX_LOOKED_AT = 8  # candidate positions per call, newest first


class PromptLookup:
    """The TokenProposer of one sequence. Indexes each token once and compares a bounded number of positions per call.

    Proposes what followed the position whose preceding tokens match the end of the sequence the longest, up to
    `max_ngram` and at least `min_ngram` tokens; among equals the newest.
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
