"""What a preempted sequence costs to bring back: its blocks copied out and in, or its tokens computed again. Pure.

Both rates are measured where they are paid: the copy rate at the start and in every step that copies, the other one in
every step that computes prompts. Recent steps count more.
"""

_NEWEST_SHARE = 0.2  # of the newest measurement in a rate


class PreemptionCost:
    """Owned by one scheduler. Rates are None until they are measured."""

    def __init__(self, copy_s_per_block: float | None = None) -> None:
        self.copy_s_per_block = copy_s_per_block  # one way
        self.compute_s_per_token: float | None = None

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks are copied out and in sooner than so many tokens are computed. Where a rate is not
        known yet, yes: a copy is bounded by the memory, computing by nothing."""
        if self.copy_s_per_block is None or self.compute_s_per_token is None:
            return True
        return 2 * num_blocks * self.copy_s_per_block < num_tokens * self.compute_s_per_token

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """Of one step, both ways together."""
        if num_blocks and seconds > 0:
            self.copy_s_per_block = _averaged(self.copy_s_per_block, seconds / num_blocks)

    def observe_compute(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Of one step without its copies. Steps that mostly decode say little about prompts: they read the weights for
        few tokens; steps that only copy say nothing."""
        if seconds > 0 and num_prompt_tokens and 2 * num_prompt_tokens >= num_tokens:
            self.compute_s_per_token = _averaged(self.compute_s_per_token, seconds / num_tokens)


def _averaged(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST_SHARE * (newest - before)
