"""The limits of a worker, and the errors with which it refuses jobs beyond them. Pure values.

A job that can never be served is refused before it gets any resource, so no admitted job waits forever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import InternalError, InvalidRequest, TandemError, WorkerTooSmall
from cluster.member import Capacity
from cluster.messages import DecodeJob, PrefillJob
from cluster.request_size import (
    NO_LIMITS,
    LengthLimits,
    RequestSize,
    blocks_for,
    blocks_shortage,
    decode_shortage,
    handoff_blocks,
    handoff_shortage,
    prefill_shortage,
    sealed_blocks,
    tail_length,
)
from cluster.service_times import NO_STEP_TARGET, StepLimit
from engine.scheduling.commands import AdmitImported


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes of pool, step and queue. `watermark` is a fraction of the pool."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_queue: int
    max_scored_tokens: int = 256  # of a step: prompt tokens whose log-probabilities it computes
    watermark: float = 0.0
    num_swap_slots: int = 0  # blocks that fit into the swap space
    lengths: LengthLimits = NO_LIMITS
    step_limit: StepLimit = NO_STEP_TARGET  # of steps that compute prompts beside running sequences
    prefix_eviction: str = "value"

    @property
    def num_watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)

    @property
    def num_longest_blocks(self) -> int:
        """The blocks of a sequence of the maximum length."""
        return blocks_for(self.max_model_len, self.block_size)

    @property
    def capacity(self) -> Capacity:
        """The limits that the worker registers, from which routers derive the requests that it would refuse."""
        return Capacity(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_watermark_blocks=self.num_watermark_blocks,
            max_input_length=self.lengths.max_input_length,
            max_output_length=self.lengths.max_output_length,
            max_prefill_tokens=self.max_prefill_tokens,
            slo_tpot_us=self.step_limit.target_us,
        )

    def num_needed(self, num_tokens: int, num_choices: int) -> int:
        """Return the number of blocks for tokens that choices share. Each further choice needs one more if the last
        block is not full."""
        return handoff_blocks(num_tokens, num_choices, self.block_size)

    def fit_together(self, num_tokens: int, num_choices: int) -> bool:
        """Return whether the pool and the slots suffice for these choices to share one prefill."""
        return num_choices <= self.max_num_seqs and self.num_needed(num_tokens, num_choices) <= self.num_blocks

    def job_refusal(self, job: DecodeJob) -> TandemError | None:
        if not job.prompt_token_ids or not job.sequences:
            return InvalidRequest("a job needs at least one prompt token and one sequence")
        if len({start.handle for start in job.sequences}) != len(job.sequences):
            return InvalidRequest("the sequences of a job need different handles")
        if any(len(start.committed_token_ids) >= job.stops.max_tokens for start in job.sequences):
            return InvalidRequest(f"a sequence has its max_tokens {job.stops.max_tokens} already")
        num_committed = len(job.sequences[0].committed_token_ids)
        size = RequestSize(len(job.prompt_token_ids), job.stops.max_tokens, num_committed, len(job.sequences))
        shortage = decode_shortage(self.capacity, size)
        if not shortage and job.signed_ticket is not None:
            shortage = handoff_shortage(self.capacity, size)
        return WorkerTooSmall(shortage) if shortage else None

    def export_refusal(self, job: PrefillJob) -> TandemError | None:
        if not job.token_ids or not job.seeds:
            return InvalidRequest("a prefill needs at least one token and one choice")
        num_prompt = len(job.token_ids) - job.num_committed
        size = RequestSize(num_prompt, job.stops.max_tokens, job.num_committed, len(job.seeds))
        shortage = prefill_shortage(self.capacity, size)
        return WorkerTooSmall(shortage) if shortage else None

    def reservation_refusal(self, num_blocks: int) -> TandemError | None:
        shortage = blocks_shortage(self.capacity, num_blocks)
        return WorkerTooSmall(shortage) if shortage else None

    def import_refusal(self, command: AdmitImported, reserved_ids: Sequence[int]) -> TandemError | None:
        """Return an error if the imported blocks are not exactly those that the job needs. A mistake would cause wrong
        tokens."""
        starts, sealed_ids, tail_ids = command.job.sequences, command.sealed_block_ids, command.tail_block_ids
        if len({start.committed_token_ids for start in starts}) != 1 or len(command.first_tokens) != len(starts):
            return InternalError("the choices of a hand-off go on from the same tokens, each with its first token")
        num_tokens = len(command.job.prompt_token_ids) + len(starts[0].committed_token_ids)
        num_sealed = sealed_blocks(num_tokens, self.block_size)
        num_tails = len(starts) if tail_length(num_tokens, self.block_size) else 0
        if (len(sealed_ids), len(tail_ids)) != (num_sealed, num_tails):
            return InternalError(
                f"{num_tokens} tokens and {len(starts)} choices need {num_sealed} blocks and {num_tails} tails;"
                f" the hand-off brought {len(sealed_ids)} and {len(tail_ids)}"
            )
        brought = {*sealed_ids, *tail_ids}
        if len(brought) != num_sealed + num_tails or not brought <= set(reserved_ids):
            return InternalError("the hand-off brought blocks that it did not reserve, or one twice")
        return None
