"""What the prefill worker can take, and how it says no. Pure values."""

from dataclasses import dataclass

from cluster.errors import PromptTooLong, TandemError
from cluster.lengths import NO_LIMITS, LengthLimits
from cluster.messages import PrefillJob
from engine.schedule import blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """Sizes of pool, step and queue."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_queue: int
    lengths: LengthLimits = NO_LIMITS
    prefix_eviction: str = "value"

    def num_needed(self, job: PrefillJob) -> int:
        """Blocks of its whole prompt."""
        return blocks_for(len(job.token_ids), self.block_size)

    def refusal(self, job: PrefillJob) -> TandemError | None:
        """Why it could never run here; None: it could."""
        refusal = self.lengths.refusal(len(job.token_ids) - job.num_committed, job.stops.max_tokens)
        if refusal is None and self.num_needed(job) > self.num_blocks:
            refusal = PromptTooLong(
                f"the prompt has {len(job.token_ids)} tokens; this worker's KV pool holds"
                f" {self.num_blocks * self.block_size}: shorten it, or give the worker more --kv-cache-memory"
            )
        return refusal
