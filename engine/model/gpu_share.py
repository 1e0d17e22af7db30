"""A worker's share of its host's GPUs: which one it uses, with how many other workers, and how much memory it needs.

Workers that one command starts on a host are numbered, as `torchrun` numbers processes, and are assigned to its GPUs in
turn. A device that was named with its index is used by every such worker. A profiling run measures the memory: the
largest step that the settings allow, on a small scratch pool.
"""

import torch

from cluster.errors import ConfigError
from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.kv.capacity import GpuMemory
from engine.kv.layout import BlockLayout
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import ModelRunner

_SAMPLING = Sampling(temperature=1.0, top_p=0.9, num_logprobs=20)  # what needs the most memory


def device_for(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> str:
    """Return the device of this worker. `wanted` is `cuda` or `cuda:N`; a worker alone uses torch's default device."""
    if ":" in wanted or local_world_size == 1:
        return wanted
    return f"cuda:{local_rank % num_gpus}"


def num_sharing(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> int:
    """Return the number of workers on this worker's GPU, itself included. Ranks at or above the world's size joined
    later."""
    world_size = max(local_world_size, local_rank + 1)
    return world_size if ":" in wanted else len(range(local_rank % num_gpus, world_size, num_gpus))


def measure(loaded: LoadedModel, settings: EngineSettings) -> GpuMemory:
    """Run the step on the model's GPU and return the memory it took. Raises ConfigError if even that step does not
    fit."""
    device = torch.device(loaded.device)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    pool = KvPool(loaded.layout, settings.max_num_seqs, device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)  # loading and checking took more for a while
    try:
        ModelRunner(loaded.forward(pool), pool).run(largest_step(settings, loaded.layout, loaded.info.max_model_len))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of --max-prefill-tokens {settings.max_prefill_tokens} and --max-num-seqs {settings.max_num_seqs} "
            f"does not fit the GPU beside {weights} bytes of weights: give less of both, or a shorter --max-model-len"
        ) from error
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_reserved(device) - reserved  # with what the allocator loses to fragments
    pool.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    sharing = num_sharing(settings.device, settings.local_rank, settings.local_world_size, torch.cuda.device_count())
    return GpuMemory(total=total, weights=weights, largest_step=step_bytes, free=free, num_sharing=sharing)


def largest_step(settings: EngineSettings, layout: BlockLayout, longest: int) -> StepPlan:
    """Return the largest step: prompt chunks up to the step's budget and as many decodes as it allows, all ending at
    the maximum length and drawing a token. Each uses one block of the pool, repeated in its table."""
    lengths = [min(longest, settings.max_prefill_tokens)]
    while len(lengths) < settings.max_num_seqs:
        left = settings.max_prefill_tokens - sum(lengths)
        lengths.append(min(longest, left) if left > 0 else 1)
    num_blocks = layout.num_blocks_for(longest)
    return StepPlan(
        tuple(
            Chunk(
                sequence_id=number,
                token_ids=(0,) * length,
                start=longest - length,
                block_ids=(number,) * num_blocks,
                samples=(Sample(seed=number, position=longest, sampling=_SAMPLING),),
            )
            for number, length in enumerate(lengths)
        )
    )
