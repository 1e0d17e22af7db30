"""The states by which a sequence's requests change its logits: of its logit rules, and of its grammar. Pure.

A state follows from the rules or the grammar, the tokens and the length of the prompt alone. It is therefore never
sent: a worker that continues a sequence makes a new one.

`LogitState` counts each token once, so a step costs the same however long the sequence is; draft tokens are counted for
the positions after them and never kept. `GrammarState` belongs, while a step runs, to the thread that computes masks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import GrammarRejected
from cluster.messages import Grammar, LogitRules

_UNKNOWN_TOKEN = -1  # engine/scheduling/step.py's


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Distinct tokens before a position, and how often each is among the output tokens; int64 arrays of one length."""

    ids: "array[int]"
    counts: "array[int]"


class LogitState:
    """The tokens that precede the next one of a sequence, as far as its rules read them.

    One sequence owns it. `seen` and `forbidden` may be called while the sequence's tokens are known.
    """

    def __init__(self, rules: LogitRules, token_ids: Sequence[int], num_prompt: int) -> None:
        """`token_ids`: the sequence's own list, which grows; its first `num_prompt` tokens are the prompt."""
        self.rules = rules
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._places: dict[int, int] = {}  # token id -> its place in `_seen`
        self._seen = SeenTokens(array("q"), array("q"))
        self._has_penalties = has_penalties(rules)
        self._always_forbidden = tuple(word[0] for word in rules.bad_words if len(word) == 1)
        self._words: dict[int, list[tuple[int, ...]]] = {}  # bad words of several tokens, by the last but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)

    @property
    def reads_tokens(self) -> bool:
        """Return whether the logits of a position depend on the tokens before it."""
        return self._has_penalties or bool(self._words)

    def seen(self, draft_tokens: Sequence[int] = ()) -> SeenTokens:
        """Return the tokens that penalties read for the position after the known and these draft tokens. Nothing if
        there are no penalties. Valid until the next call."""
        if not self._has_penalties:
            return SeenTokens(array("q"), array("q"))
        self._count_known()
        if not draft_tokens:
            return self._seen
        places, seen = self._places.copy(), SeenTokens(self._seen.ids[:], self._seen.counts[:])
        for token_id in draft_tokens:
            _count(token_id, 1, places, seen)
        return seen

    def forbidden(self, draft_tokens: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word at that position."""
        if not self._words:
            return self._always_forbidden
        last = draft_tokens[-1] if draft_tokens else self._token_ids[-1]
        assert last != _UNKNOWN_TOKEN, "the token before a bad word's last one must be known"
        words = self._words.get(last, ())
        return self._always_forbidden + tuple(word[-1] for word in words if self._ends_with(word[:-1], draft_tokens))

    def _count_known(self) -> None:
        known = self._token_ids
        for place in range(self._num_counted, len(known)):
            assert known[place] != _UNKNOWN_TOKEN, "the token before a penalized position must be known"
            _count(known[place], int(place >= self._num_prompt), self._places, self._seen)
        self._num_counted = len(known)

    def _ends_with(self, beginning: tuple[int, ...], draft_tokens: Sequence[int]) -> bool:
        end = tuple(draft_tokens[-len(beginning) :])
        if len(end) < len(beginning):
            num_missing = len(beginning) - len(end)
            end = (*self._token_ids[-num_missing:], *end)
        return end == beginning


def has_penalties(rules: LogitRules) -> bool:
    return (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty) != (1.0, 0.0, 0.0)


def _count(token_id: int, num_output: int, places: dict[int, int], seen: SeenTokens) -> None:
    place = places.get(token_id)
    if place is None:
        places[token_id] = len(seen.ids)
        seen.ids.append(token_id)
        seen.counts.append(num_output)
    else:
        seen.counts[place] += num_output


class GrammarState:
    """The grammar of one sequence, which owns this state. `matcher` and `masks` belong to
    engine/grammar/compiled_grammars.py.
    """

    __slots__ = ("_num_prompt", "_token_ids", "grammar", "masks", "matcher", "refusal")

    def __init__(self, grammar: Grammar, token_ids: Sequence[int], num_prompt: int) -> None:
        """`token_ids`: the sequence's own list, which grows; its first `num_prompt` tokens are the prompt."""
        self.grammar = grammar
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self.matcher: object | None = None  # after the output tokens of an earlier step
        self.masks: object | None = None  # of the running step: one per position that it draws
        self.refusal: GrammarRejected | None = None  # why no token of the running step may be drawn

    def output_from(self, num_known: int) -> Sequence[int]:
        """Return the output tokens without the first `num_known`."""
        return self._token_ids[self._num_prompt + num_known :]

    @property
    def num_output(self) -> int:
        return len(self._token_ids) - self._num_prompt
