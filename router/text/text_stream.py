"""The text of one choice: detokenized incrementally and cut at the first stop string. Text once released is never
revoked.

Holds back text that a later token could still change, and text that may begin a stop string. Workers handle stop
tokens: the EOS or stop token that ends a sequence is not pushed, unless the request includes its text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from router.text.detokenizer import Detokenizer


class TextDelta(NamedTuple):
    """The text that a push released. `stopped_by`: the stop string that ended it; tokens after `num_tokens_used` are
    void.
    """

    text: str
    stopped_by: str | None
    num_tokens_used: int


class TextStream:
    """The text of one choice. The same tokens give the same text however they are grouped, so a resumed request replays
    its committed tokens and continues from the characters that the client has."""

    def __init__(
        self, detokenizer: Detokenizer | None, stop: Sequence[str], min_tokens: int, *, includes_stop: bool = False
    ) -> None:
        """Create an empty stream. Without a detokenizer the text stays empty. A stop string counts once `min_tokens`
        tokens have come. With `includes_stop` it is the end of the text."""
        assert detokenizer is not None or not stop, "stop strings need a detokenizer"
        self._detokenizer = detokenizer
        self._matcher = _StopMatcher(stop, includes_stop=includes_stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens and return the text that they release."""
        released: list[str] = []
        for index, token_id in enumerate(token_ids):
            text, stopped_by = self.push_one(token_id)
            released.append(text)
            if stopped_by is not None:
                return TextDelta("".join(released), stopped_by, index + 1)
        return TextDelta("".join(released), None, len(token_ids))

    def push_one(self, token_id: int) -> tuple[str, str | None]:
        """Add a token. Returns the text that it releases, and the stop string that ended the text."""
        assert not self._ended, "the text has ended"
        if self._detokenizer is None:
            return "", None
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._matcher is None:
            return text, None
        text, stopped_by = self._matcher.push(text, armed=self._num_tokens >= self._min_tokens)
        self._ended = stopped_by is not None
        return text, stopped_by

    def flush(self) -> str:
        """End the text by EOS, a stop token or length. Returns the text that was held back, cut at a stop string that
        it completes."""
        if self._detokenizer is None or self._ended:
            return ""
        self._ended = True
        text = self._detokenizer.end()
        if self._matcher is None:
            return text
        text, stopped_by = self._matcher.push(text, armed=self._num_tokens >= self._min_tokens)
        return text if stopped_by is not None else text + self._matcher.held


class _StopMatcher:
    """Finds the stop string that is complete first; of those complete at the same character, the longest.

    It runs one Knuth-Morris-Pratt automaton per stop string, so a character costs the same however much text is held
    back.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool) -> None:
        assert all(stops), "an empty stop string"
        self._includes_stop = includes_stop
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self.held = ""  # the longest end of the text that begins some stop string

    def push(self, text: str, *, armed: bool) -> tuple[str, str | None]:
        """Return the text that can no longer be part of a stop string, and the stop string that is complete now.

        A stop string that is complete while not `armed` is ordinary text.
        """
        pending = self.held + text
        for end, character in enumerate(text, start=len(self.held) + 1):
            for i, stop in enumerate(self._stops):
                self._matched[i] = self._step(i, character)
                if self._matched[i] < len(stop):
                    continue
                if armed:
                    return pending[: end if self._includes_stop else end - len(stop)], stop
                self._matched[i] = self._borders[i][-1]
        num_held = max(self._matched)
        self.held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held], None

    def _step(self, i: int, character: str) -> int:
        stop, borders, matched = self._stops[i], self._borders[i], self._matched[i]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        return matched + 1 if stop[matched] == character else 0


def _borders(pattern: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
