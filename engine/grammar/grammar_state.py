"""The grammar of one sequence against its tokens. Pure.

The state follows from the grammar and the output tokens alone. It is therefore never sent: a worker that continues a
sequence makes a new one and replays the tokens. While one step runs it belongs to the thread that computes masks.
"""

from collections.abc import Sequence

from cluster.errors import GrammarRejected
from cluster.messages import Grammar


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
