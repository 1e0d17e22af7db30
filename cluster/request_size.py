"""The size of a request in tokens and blocks, and the checks that it is within the operator's limits and that a worker
can hold it. Pure.

Routers apply these rules at admission and placement, and workers apply them again.

A worker can hold a request when it can run every choice to its end with nothing else on the worker. The choices of a
request need not fit the pool all at once: a decode worker preempts some of them, and they take turns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.errors import ContextLengthExceeded, InvalidRequest, NoWorkerLargeEnough
from cluster.member import Capacity


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The limits `--max-input-length` and `--max-output-length`; 0: only `--max-model-len` applies."""

    max_input_length: int = 0
    max_output_length: int = 0

    def most_output(self, room: int) -> int:
        """Return how many output tokens are allowed if the context has room for `room` tokens."""
        return min(room, self.max_output_length or room)

    def refusal(self, num_input: int, max_tokens: int) -> InvalidRequest | None:
        """Return the error for a request that exceeds a limit, or None if it is within the limits."""
        if 0 < self.max_input_length < num_input:
            return ContextLengthExceeded(
                f"the prompt has {num_input} tokens; --max-input-length allows at most {self.max_input_length}",
                num_prompt=num_input,
                most=self.max_input_length,
            )
        if 0 < self.max_output_length < max_tokens:
            return InvalidRequest(
                f"max_tokens is {max_tokens}; --max-output-length allows at most {self.max_output_length}"
            )
        return None


NO_LIMITS = LengthLimits()


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The size of a request in tokens. `max_tokens` counts all output tokens of one choice. The client already has
    `num_committed` of them; a new attempt computes their KV together with the prompt's."""

    num_prompt: int
    max_tokens: int
    num_committed: int = 0
    num_choices: int = 1  # choices that share the prompt

    @property
    def num_known(self) -> int:
        """Return the number of tokens that a prefill computes and a hand-off moves."""
        return self.num_prompt + self.num_committed

    @property
    def needs_decode(self) -> bool:
        """Return whether a decode leg is needed: prefill itself samples one token."""
        return self.max_tokens - self.num_committed > 1


def prefill_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Return why this prefill worker can never compute the tokens known so far, or an empty string if it can."""
    most = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)
    if size.num_known > most:
        return f"the prompt has {size.num_known} tokens; this worker holds at most {most}"
    return _length_shortage(capacity, size)


def decode_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Return why this decode worker can never run a choice to its end, or an empty string if it can. The worker may
    prefill the prompt itself."""
    num_tokens, most = size.num_prompt + size.max_tokens, most_tokens(capacity)
    if num_tokens > most:
        return (
            f"prompt {size.num_prompt} + max_tokens {size.max_tokens} = {num_tokens} tokens;"
            f" this worker holds at most {most}"
        )
    return _length_shortage(capacity, size)


def handoff_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Return why this decode worker can never import the known tokens of all choices at once, or an empty string if it
    can."""
    return blocks_shortage(capacity, handoff_blocks(size.num_known, size.num_choices, capacity.block_size))


def blocks_shortage(capacity: Capacity, num_blocks: int) -> str:
    """Return the shortage as `handoff_shortage` does, for a hand-off that reserves `num_blocks` blocks."""
    most = capacity.num_blocks - capacity.num_watermark_blocks
    if num_blocks <= most:
        return ""
    return (
        f"the hand-off needs {num_blocks} blocks; this worker's pool has {capacity.num_blocks} and allows at most"
        f" {most} for hand-offs"
    )


def handoff_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Return the number of blocks for tokens that choices share. If the last block is not full, each further choice
    needs its own copy of it."""
    num_copies = num_choices - 1 if num_tokens % block_size else 0
    return blocks_for(num_tokens, block_size) + num_copies


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens occupy, a partly filled one included."""
    return -(-num_tokens // block_size)


def sealed_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that `num_tokens` tokens fill completely."""
    return num_tokens // block_size


def tail_length(num_tokens: int, block_size: int) -> int:
    """Return the number of tokens in the last, partly filled block, or 0 if all blocks are full."""
    return num_tokens % block_size


def most_tokens(capacity: Capacity) -> int:
    """Return the maximum number of tokens, prompt and output, that a decode worker can hold: one more than its pool has
    slots for, because the KV of a sequence's last token is never computed."""
    return min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)


def most_output(capacities: Iterable[Capacity], num_prompt: int) -> int:
    """Return the maximum number of output tokens that one of these decode workers can add to a prompt of `num_prompt`
    tokens; 0 if none can add any."""
    return max((_most_output(capacity, num_prompt) for capacity in capacities), default=0)


def too_large(size: RequestSize, decodes: Sequence[Capacity]) -> NoWorkerLargeEnough:
    """Return the error for a request that none of these decode workers can hold."""
    largest = max(decodes, key=most_tokens, default=None)
    known = f"The largest of {len(decodes)} decode worker(s) holds {most_tokens(largest)}: " if largest else ""
    return NoWorkerLargeEnough(
        f"no worker is large enough for this request: prompt {size.num_prompt} + max_tokens {size.max_tokens} ="
        f" {size.num_prompt + size.max_tokens} tokens. {known}start one with a larger --num-blocks or"
        f" --kv-cache-memory{_other_flags(largest) if largest else ''}, or ask for less"
    )


def _most_output(capacity: Capacity, num_prompt: int) -> int:
    room = most_tokens(capacity) - num_prompt
    is_refused = room < 1 or _length_shortage(capacity, RequestSize(num_prompt, 1))
    return 0 if is_refused else _lengths(capacity).most_output(room)


def _length_shortage(capacity: Capacity, size: RequestSize) -> str:
    refusal = _lengths(capacity).refusal(size.num_prompt, size.max_tokens)
    return refusal.message if refusal is not None else ""


def _lengths(capacity: Capacity) -> LengthLimits:
    return LengthLimits(capacity.max_input_length, capacity.max_output_length)


def _other_flags(capacity: Capacity) -> str:
    """Return the flags, besides those of the pool's size, that limit this worker."""
    limits = {
        "--max-model-len": capacity.max_model_len <= capacity.num_blocks * capacity.block_size,
        "--max-input-length": capacity.max_input_length > 0,
        "--max-output-length": capacity.max_output_length > 0,
    }
    named = [flag for flag, is_limit in limits.items() if is_limit]
    return f" (and {', '.join(named)})" if named else ""
