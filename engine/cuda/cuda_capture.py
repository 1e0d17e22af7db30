"""Captures of `torch.cuda.CUDAGraph`, all in one memory pool: graphs run one at a time, so each may use what the last
one used."""

from collections.abc import Callable

import torch

_NUM_WARM_UPS = 2  # kernels are compiled and libraries choose theirs before anything is recorded


class CudaCapture:
    """A Capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError when something in `compute` waits for the device, or grows what it must not."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                prepare()
                compute()
            prepare()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        current.wait_stream(self._stream)
        return graph.replay
