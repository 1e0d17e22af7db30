"""Arithmetic that both workers plan with: tokens into blocks, prompt work into chunks. Pure.

A step carries at most `max_prefill_tokens` tokens. Decodes are never held back: each spends one token of it first.
What is left goes to prompts, oldest first, as much as each can use. A chunk that takes all it can has sealed all it can
(a prompt's sealed blocks are its computed tokens divided by `block_size`), so ending one early on a block's boundary
would seal nothing sooner and leave budget unspent; with one prompt at a time and a budget that is a multiple of the
block size the ends fall on boundaries by themselves.
"""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens occupy, the last perhaps partly."""
    return -(-num_tokens // block_size)


def sealed_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill to the last position."""
    return num_tokens // block_size


def tail_length(num_tokens: int, block_size: int) -> int:
    """Valid positions of the last, partly filled block; 0 when there is none."""
    return num_tokens % block_size


class ChunkBudget:
    """The tokens of one step. Owned by the plan that is being made."""

    def __init__(self, max_prefill_tokens: int, num_decodes: int = 0) -> None:
        # At least one: where as many sequences decode as the budget has tokens, a prompt still advances.
        self.left = max(1, max_prefill_tokens - num_decodes)

    def take(self, num_tokens: int) -> int:
        """The size of the next chunk of a prompt that has so many tokens to go."""
        taken = min(num_tokens, self.left)
        self.left -= taken
        return taken
