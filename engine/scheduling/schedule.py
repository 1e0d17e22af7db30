"""Rules of the scheduler: tokens per block, the token budget of a step, when a sequence ends, and deadlines. Pure.

A step computes at most `max_prefill_tokens` tokens. Each decoding sequence uses one token of that budget first; the
rest goes to prompts, oldest first, as much as each can use. Chunks need not end on a block's boundary: ending a chunk
early would seal no block sooner and would leave budget unused.

Beside running sequences, prompts also get limited time (`PromptTime`), which protects the time between tokens.
"""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

from cluster.messages import FinishReason, TokenStops
from cluster.service_times import PrefillTimes

_NONE: frozenset[int] = frozenset()
Key = TypeVar("Key", bound=Hashable)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens occupy, a partly filled one included."""
    return -(-num_tokens // block_size)


def sealed_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens fill completely."""
    return num_tokens // block_size


def tail_length(num_tokens: int, block_size: int) -> int:
    """Return the number of tokens in the last, partly filled block, or 0 if all blocks are full."""
    return num_tokens % block_size


class PromptTime:
    """The seconds that the prompts of the step being planned may still add to it.

    Three exceptions keep prompts going. The first prompt gets at least one block of tokens. The last tokens of a
    prompt, if they are less than a block, are computed with those before them, since a step of their own would take
    longer. A prompt that follows another one gets at least one token.
    """

    def __init__(self, times: PrefillTimes, seconds: float, block_size: int) -> None:
        self._times = times
        self._left_s = seconds
        self._block_size = block_size
        self._is_first = True

    @property
    def is_used_up(self) -> bool:
        """Whether no prompt may begin: less than a block at the start of a prompt would fit."""
        return not self._is_first and self._times.added_s(self._block_size, 0) > self._left_s

    def take(self, num_tokens: int, num_left: int, context: int) -> int:
        """Use the time for up to `num_tokens` of the `num_left` tokens that a prompt has left behind `context` computed
        ones, and return how many may be computed."""
        floor = self._block_size if self._is_first else 1
        taken = max(min(num_tokens, floor), self._times.tokens_within(self._left_s, context, num_tokens))
        if num_left - taken < self._block_size:
            taken = num_tokens
        self._left_s -= self._times.added_s(taken, context)
        self._is_first = False
        return taken


class ChunkBudget:
    """The number of tokens that the step being planned may still compute, and the time that prompts may use of it."""

    def __init__(self, max_prefill_tokens: int, num_decodes: int = 0) -> None:
        # At least one, so that a prompt advances even if decoding sequences use the whole budget.
        self.left = max(1, max_prefill_tokens - num_decodes)
        self._prompt_time: PromptTime | None = None

    def limit_prompts(self, prompt_time: PromptTime | None) -> None:
        """Limit the time of prompts too; None: they may use all tokens."""
        self._prompt_time = prompt_time

    @property
    def has_room_for_prompts(self) -> bool:
        return self.left > 0 and (self._prompt_time is None or not self._prompt_time.is_used_up)

    def take(self, num_tokens: int) -> int:
        """Use the budget for up to `num_tokens` tokens and return how many fit."""
        taken = min(num_tokens, self.left)
        self.left -= taken
        return taken

    def take_for_prompt(self, num_left: int, context: int) -> int:
        """Like `take`, for the `num_left` last tokens of a prompt, of which `context` are computed already. There must
        be room for prompts; at least one token fits."""
        fitting = min(num_left, self.left)
        return self.take(fitting if self._prompt_time is None else self._prompt_time.take(fitting, num_left, context))


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


class Deadlines(Generic[Key]):
    """The deadlines of one scheduler's work, by key. A scheduler discards a key when its work ends for any reason.

    `due` costs O(1) until a deadline may have passed.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._earliest_s = math.inf  # at or before the earliest deadline; exact after each scan

    def add(self, key: Key, deadline_s: float) -> None:
        assert key not in self._deadlines, f"{key!r} has a deadline already"
        self._deadlines[key] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def discard(self, key: Key) -> None:
        self._deadlines.pop(key, None)

    def due(self, now_s: float) -> tuple[Key, ...]:
        """Remove and return the keys whose deadline has passed, in the order they were added."""
        if now_s < self._earliest_s:
            return ()
        due = tuple(key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s)
        for key in due:
            del self._deadlines[key]
        self._earliest_s = min(self._deadlines.values(), default=math.inf)
        return due

    def next_s(self) -> float | None:
        """Return a time no later than the earliest deadline, or None if there is none."""
        return self._earliest_s if self._deadlines else None
