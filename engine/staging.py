"""Small tensors between host and device without waiting: through pinned memory, by copies that the stream orders.

torch keeps pinned memory in a cache, and gives a piece out again only after the copies that read or wrote it are done.
"""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device. On a GPU the host goes on before it is there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def together_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Host tensors of one dtype, by one copy; what comes back shares its memory."""
    flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As they are on a CPU; from a GPU in pinned memory, filled when the stream has come so far."""
    return [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        if tensor.device.type == "cuda"
        else tensor
        for tensor in tensors
    ]
