"""Copies small tensors between host and device without waiting: through pinned memory, in the order of the stream.

torch keeps pinned memory in a cache, and reuses a piece only after the copies that read or wrote it are done.
"""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device. On a GPU the call returns before the copy is done."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def together_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy host tensors of one dtype to the device in one copy; the results share its memory."""
    flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy device tensors to the host: from a GPU into pinned memory, which is valid once the stream has reached this
    point."""
    return [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        if tensor.device.type == "cuda"
        else tensor
        for tensor in tensors
    ]
