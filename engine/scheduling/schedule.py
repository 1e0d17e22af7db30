"""Rules of the scheduler: tokens per block, the token budget of a step, when a sequence ends, and deadlines. Pure.

A step computes at most `max_prefill_tokens` tokens. Each decoding sequence uses one token of that budget first; the
rest goes to prompts, oldest first, as much as each can use. Chunks need not end on a block's boundary: ending a chunk
early would seal no block sooner and would leave budget unused.
"""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

from cluster.messages import FinishReason, TokenStops

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


class ChunkBudget:
    """The number of tokens that the step being planned may still compute."""

    def __init__(self, max_prefill_tokens: int, num_decodes: int = 0) -> None:
        # At least one, so that a prompt advances even if decoding sequences use the whole budget.
        self.left = max(1, max_prefill_tokens - num_decodes)

    def take(self, num_tokens: int) -> int:
        """Use the budget for up to `num_tokens` tokens and return how many fit."""
        taken = min(num_tokens, self.left)
        self.left -= taken
        return taken


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
