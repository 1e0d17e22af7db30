"""Captures of `torch.cuda.CUDAGraph`, all in one memory pool: graphs run one at a time, so each may use what the last
one used."""

from collections.abc import Callable

import torch


class CudaCapture:
    """A Capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError where `compute` waits for the device: noticed before anything is recorded, for torch's
        allocator does not get over a capture that fails."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for mode in ("default", "error"):  # first kernels are compiled and libraries choose theirs
                prepare()
                _run(compute, mode)
            prepare()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        current.wait_stream(self._stream)
        return graph.replay


def _run(compute: Callable[[], object], sync_debug_mode: str) -> None:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(sync_debug_mode)
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode(before)
