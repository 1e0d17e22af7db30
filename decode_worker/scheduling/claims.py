"""A hand-off's claim on blocks, from what was asked for. Pure."""

import math

from decode_worker.scheduling.commands import Reserve
from decode_worker.scheduling.reservations import Claim
from engine.scheduling.length_prediction import LengthPredictor
from engine.scheduling.policies import Work
from engine.scheduling.schedule import blocks_for


def claim_of(command: Reserve, number: int, now_s: float, block_size: int, lengths: LengthPredictor | None) -> Claim:
    """`number`: its arrival. Its prompt is computed elsewhere."""
    work, num_to_grow = Work(arrival=number, arrived_s=now_s, deadline_s=math.inf, num_prompt=0), 0
    if (job := command.job) is not None:
        num_prompt, num_output = len(job.prompt_token_ids), len(job.sequences[0].committed_token_ids)
        predicted = 0
        if lengths is not None:
            predicted = lengths.predict(job.cache_salt, num_prompt, num_output, job.stops.max_tokens)
        work = Work(
            arrival=number,
            arrived_s=now_s - job.age_s,
            deadline_s=now_s + job.timeout_s,
            num_prompt=num_prompt,
            num_done=num_prompt + num_output,
            predicted_tokens=predicted,
            priority=job.priority,
            is_batch=job.is_batch,
            is_resumed=job.is_interrupted,
        )
        known, most = num_prompt + num_output, num_prompt + max(num_output, predicted - 1)
        num_to_grow = len(job.sequences) * (blocks_for(most, block_size) - blocks_for(known, block_size))
    return Claim(number, command.handoff_id, command.num_blocks, command.block_hashes, work, now_s, num_to_grow)
