"""The limits of a prefill worker, and the errors with which it refuses jobs beyond them. Pure values."""

from dataclasses import dataclass

from cluster.errors import TandemError, WorkerTooSmall
from cluster.member import Capacity
from cluster.messages import PrefillJob
from cluster.request_size import NO_LIMITS, LengthLimits, RequestSize, prefill_shortage
from engine.scheduling.schedule import blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """Sizes of pool, step and queue."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_queue: int
    lengths: LengthLimits = NO_LIMITS
    prefix_eviction: str = "value"

    @property
    def capacity(self) -> Capacity:
        """What the worker registers, so that routers know which requests it would refuse."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_input_length=self.lengths.max_input_length,
            max_output_length=self.lengths.max_output_length,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    def num_needed(self, job: PrefillJob) -> int:
        """Return the number of blocks of the whole prompt."""
        return blocks_for(len(job.token_ids), self.block_size)

    def refusal(self, job: PrefillJob) -> TandemError | None:
        """Return why this job can never run here, or None if it can."""
        num_prompt = len(job.token_ids) - job.num_committed
        size = RequestSize(num_prompt, job.stops.max_tokens, job.num_committed, len(job.seeds))
        shortage = prefill_shortage(self.capacity, size)
        return WorkerTooSmall(shortage) if shortage else None
