"""A runner whose KV is the token ids themselves, block by block.

The next token is a hash of everything that the chunk's block table leads to, so a wrong table, a block freed too early,
a missed copy or a wrong position gives a wrong token. With logit rules the counted tokens are hashed too.
"""

from collections.abc import Sequence

from cluster.messages import Sampling
from engine.sampling.logit_state import LogitState
from engine.scheduling.step import Chunk, DrawnToken, Sample, StepPlan, StepResult

VOCAB_SIZE = 50


def next_token(token_ids: Sequence[int], sample: Sample) -> int:
    """Return the token that a serial run draws after these tokens."""
    assert sample.position == len(token_ids)
    state, banned = sample.logit_state, sample.banned_token_ids
    counts: tuple[tuple[int, int], ...] = ()
    if state is not None:
        seen = state.seen(sample.draft_tokens)
        counts = tuple(sorted(zip(seen.ids, seen.counts, strict=True)))
        banned |= {*state.forbidden(sample.draft_tokens)}
    for attempt in range(1000):
        token_id = hash((tuple(token_ids), sample.seed, attempt, *counts)) % VOCAB_SIZE
        if token_id not in banned:
            return token_id
    raise AssertionError("everything is banned")


def sample_after(
    token_ids: Sequence[int],
    num_prompt: int,
    *,
    seed: int,
    sampling: Sampling,
    banned: frozenset[int] = frozenset(),
) -> Sample:
    """Return the sample of the next token of a serial run, whose prompt has `num_prompt` tokens."""
    state = None if sampling.rules is None else LogitState(sampling.rules, token_ids, num_prompt)
    return Sample(seed, len(token_ids), sampling, banned, state)


class FakePagedRunner:
    """The runner. `written[block]` has the token id at each of the block's positions; None if nothing was written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.written: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: dict[int, list[int | None]] = {}  # by slot
        self._block_size = block_size
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        slots = [swap.slot for swap in (*plan.swaps_out, *plan.swaps_in)]
        assert len(set(slots)) == len(slots), "a slot is written and read, or twice either, in one step"
        for swap in plan.swaps_out:
            self.host[swap.slot] = list(self.written[swap.block_id])
        for swap in plan.swaps_in:
            self.written[swap.block_id] = self.host.pop(swap.slot)
        for copy in plan.copies:
            self.written[copy.target] = list(self.written[copy.source])
        for chunk in plan.chunks:
            for place, token_id in enumerate(chunk.token_ids, start=chunk.start):
                self.written[chunk.block_ids[place // self._block_size]][place % self._block_size] = token_id
        return StepResult(tuple(map(self._draw, plan.chunks)))

    def _draw(self, chunk: Chunk) -> tuple[DrawnToken, ...]:
        """Draw a chunk's tokens: the accepted draft tokens and one more. Rejected draft tokens leave no KV."""
        assert len(chunk.block_ids) == -(-chunk.end // self._block_size), "the table ends with the chunk"
        known = chunk.end - chunk.num_draft_tokens
        drawn = []
        for place, sample in enumerate(chunk.samples):
            token_ids = self.read(chunk.block_ids, known + place if chunk.num_draft_tokens else known)
            drawn.append(DrawnToken(next_token(token_ids, sample)))
            if place < chunk.num_draft_tokens and drawn[-1].token_id != chunk.token_ids[place - chunk.num_draft_tokens]:
                break
        if chunk.num_draft_tokens:
            for place in range(known + len(drawn) - 1, chunk.end):
                self.written[chunk.block_ids[place // self._block_size]][place % self._block_size] = None
        return tuple(drawn)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return the tokens stored as KV in the blocks of a table."""
        tokens = [self.written[block_ids[p // self._block_size]][p % self._block_size] for p in range(num_tokens)]
        assert None not in tokens, f"position {tokens.index(None)} of {num_tokens} was never written"
        return tuple(token for token in tokens if token is not None)

    def scribble(self, block_id: int, mark: int) -> None:
        """Overwrite blocks, as an import or the late read of a dead import does."""
        self.written[block_id] = [-mark] * self._block_size


def num_tokens(plan: StepPlan) -> int:
    return sum(len(chunk.token_ids) for chunk in plan.chunks)
