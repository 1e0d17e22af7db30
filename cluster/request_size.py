"""Whether a worker can ever hold a request: the one rule by which workers refuse and routers choose workers. Pure.

A worker can hold a request when it can run every choice to its end with nothing else on the worker. The choices of a
request need not fit the pool all at once: a decode worker preempts some of them, and they take turns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.errors import NoWorkerLargeEnough
from cluster.member import Capacity
from cluster.settings.lengths import LengthLimits


@dataclass(frozen=True, slots=True)
class RequestSize:
    """In tokens. `max_tokens` counts all output tokens of one choice; the client has `num_committed` of them, and a new
    attempt computes these together with the prompt."""

    num_prompt: int
    max_tokens: int
    num_committed: int = 0
    num_choices: int = 1  # that share these tokens

    @property
    def num_known(self) -> int:
        """Tokens that a prefill computes and a hand-off moves."""
        return self.num_prompt + self.num_committed

    @property
    def needs_decode(self) -> bool:
        """A prefill draws one token itself."""
        return self.max_tokens - self.num_committed > 1


def prefill_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Why this prefill worker can never compute the tokens known so far; empty when it can."""
    most = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)
    if size.num_known > most:
        return f"the prompt has {size.num_known} tokens; this worker holds {most}"
    return _length_shortage(capacity, size)


def decode_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Why this decode worker can never run a choice to its end; empty when it can, from a prefill of its own."""
    num_tokens, most = size.num_prompt + size.max_tokens, most_tokens(capacity)
    if num_tokens > most:
        return (
            f"prompt {size.num_prompt} + max_tokens {size.max_tokens} = {num_tokens} tokens;"
            f" this worker takes at most {most}"
        )
    return _length_shortage(capacity, size)


def handoff_shortage(capacity: Capacity, size: RequestSize) -> str:
    """Why this decode worker can never import the known tokens of all choices at once; empty when it can."""
    return blocks_shortage(capacity, handoff_blocks(size.num_known, size.num_choices, capacity.block_size))


def blocks_shortage(capacity: Capacity, num_blocks: int) -> str:
    """As `handoff_shortage`, of a hand-off that reserves so many blocks."""
    most = capacity.num_blocks - capacity.num_watermark_blocks
    if num_blocks <= most:
        return ""
    return (
        f"the hand-off needs {num_blocks} blocks; this worker's pool has {capacity.num_blocks} and gives at most {most}"
        " to hand-offs"
    )


def handoff_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks of tokens that choices share. Each further choice needs its own copy of a last block that is not full."""
    num_copies = num_choices - 1 if num_tokens % block_size else 0
    return -(-num_tokens // block_size) + num_copies


def most_tokens(capacity: Capacity) -> int:
    """The most tokens of prompt and output that a decode worker can hold: one more than its pool has places for, since
    the KV of a sequence's last token is never computed."""
    return min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)


def most_output(capacities: Iterable[Capacity], num_prompt: int) -> int:
    """The most output tokens that one of these decode workers can add to such a prompt; 0 when none can add any."""
    return max((_most_output(capacity, num_prompt) for capacity in capacities), default=0)


def too_large(size: RequestSize, decodes: Sequence[Capacity]) -> NoWorkerLargeEnough:
    """None of these decode workers, the known ones, can hold the request."""
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
    """Flags besides the pool's size that limit this worker."""
    limits = {
        "--max-model-len": capacity.max_model_len <= capacity.num_blocks * capacity.block_size,
        "--max-input-length": capacity.max_input_length > 0,
        "--max-output-length": capacity.max_output_length > 0,
    }
    named = [flag for flag, is_limit in limits.items() if is_limit]
    return f" (and {', '.join(named)})" if named else ""
