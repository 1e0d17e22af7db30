"""How much more memory the sequences will need at most, if they last as long as predicted. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.scheduling.schedule import blocks_for


@dataclass(frozen=True, slots=True)
class Future:
    """Of one sequence: its known tokens, how many more are predicted (at least one), and the blocks that it has and
    gives back at its end."""

    num_tokens: int
    num_to_come: int
    num_blocks: int


def most_growth(futures: Iterable[Future], block_size: int) -> int:
    """The most blocks that they will hold at any time beyond those that they hold now, each growing by a token a step
    until it ends. A last token's KV is never needed."""
    ends = sorted(futures, key=lambda future: future.num_to_come)
    full = sum(future.num_tokens // block_size for future in ends)
    tails = Counter(future.num_tokens % block_size for future in ends)  # few lengths, however many sequences
    num_held = sum(future.num_blocks for future in ends)
    most = 0
    for future in ends:
        # The worst moments are the last steps of those that end.
        grown = sum(count * blocks_for(tail + future.num_to_come - 1, block_size) for tail, count in tails.items())
        most = max(most, full + grown - num_held)
        full -= future.num_tokens // block_size
        tails[future.num_tokens % block_size] -= 1
    return most
