"""The Muon optimizer: momentum whose updates are made nearly orthogonal. For weight matrices between hidden layers
only.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). torch.optim.Muon iterates in
bfloat16, which is slow on processors without bfloat16 units; this one stays in float32.
"""

from collections.abc import Iterable

import torch


class Muon:
    """Owns one momentum buffer per matrix; the learning rate is an argument of each step."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, momentum: float, weight_decay: float) -> None:
        self._matrices = list(matrices)
        self._buffers = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrix, buffer in zip(self._matrices, self._buffers, strict=True):
            assert matrix.grad is not None
            buffer.lerp_(matrix.grad, 1 - self._momentum)
            nesterov = matrix.grad.lerp(buffer, self._momentum)
            rows, columns = matrix.shape
            matrix.mul_(1 - lr * self._weight_decay)
            matrix.add_(_orthogonal(nesterov), alpha=-lr * max(1.0, rows / columns) ** 0.5)


def _orthogonal(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return approximately the nearest orthogonal matrix: a quintic Newton-Schulz iteration on the singular values."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: torch.Tensor = update / (update.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
