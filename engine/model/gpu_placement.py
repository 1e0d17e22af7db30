"""Which GPU of its host a worker takes, and with how many others. Pure.

Workers that one command starts on a host are numbered, as `torchrun` numbers processes, and go round its GPUs. A device
that was named with its index is every such worker's.
"""


def device_for(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> str:
    """Return the device of this worker. `wanted` is `cuda` or `cuda:N`; a worker alone uses torch's default device."""
    if ":" in wanted or local_world_size == 1:
        return wanted
    return f"cuda:{local_rank % num_gpus}"


def num_sharing(wanted: str, local_rank: int, local_world_size: int, num_gpus: int) -> int:
    """Return the number of workers on this worker's GPU, itself included. Ranks beyond the world's size joined
    later."""
    world_size = max(local_world_size, local_rank + 1)
    return world_size if ":" in wanted else len(range(local_rank % num_gpus, world_size, num_gpus))
