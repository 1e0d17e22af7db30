"""What the prefill worker can take, and how it says no. Pure values."""

from dataclasses import dataclass

from cluster.errors import TandemError, WorkerTooSmall
from cluster.member import Capacity
from cluster.messages import PrefillJob
from cluster.request_size import RequestSize, prefill_shortage
from cluster.settings.lengths import NO_LIMITS, LengthLimits
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
        """What routers are told, from which they conclude what is refused here."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_input_length=self.lengths.max_input_length,
            max_output_length=self.lengths.max_output_length,
        )

    def num_needed(self, job: PrefillJob) -> int:
        """Blocks of its whole prompt."""
        return blocks_for(len(job.token_ids), self.block_size)

    def refusal(self, job: PrefillJob) -> TandemError | None:
        """Why it could never run here; None when it could."""
        num_prompt = len(job.token_ids) - job.num_committed
        size = RequestSize(num_prompt, job.stops.max_tokens, job.num_committed, len(job.seeds))
        shortage = prefill_shortage(self.capacity, size)
        return WorkerTooSmall(shortage) if shortage else None
