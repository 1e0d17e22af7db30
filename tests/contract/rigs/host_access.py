"""PoolAccess over host memory: what `cuda_ipc` does with pages of a GPU, with a memfd in their place."""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtransfer.digests import digest_blocks
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.cuda.transport import Mapping


@dataclass
class ExportedPool:
    """ExportedMemory whose pages are the file of a CPU pool."""

    pool: PoolMemory
    why_no_cuda_file: str = ""
    memfd: int | None = None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.pool.block_bytes

    @property
    def raw(self) -> torch.Tensor:
        return self.pool.raw

    @property
    def cuda_file(self) -> int | None:
        return self.pool.memfd

    @property
    def cuda_file_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class HostMapping:
    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data


class HostAccess:
    """Access to host memory. `held` copies wait for `go`; `fail` makes mapping fail."""

    def __init__(self, pool: PoolMemory, device: str = "gpu-0", reaches: Sequence[str] = ("gpu-0",)) -> None:
        self._pool, self._device, self._reaches = pool, device, reaches
        self.fail = False
        self.copying, self.go = threading.Event(), threading.Event()
        self.go.set()

    def device(self) -> str:
        return self._device

    def reaches(self, device: str) -> bool:
        return device in self._reaches

    def map(self, file: int, num_bytes: int) -> HostMapping:
        try:
            if self.fail:
                raise TransportError("the driver answers CUDA_ERROR_NOT_SUPPORTED")
            return HostMapping(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def copy(self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        self.copying.set()
        assert self.go.wait(20)
        size = self._pool.block_bytes
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            ctypes.memmove(self._pool.raw[target_id].data_ptr(), source.address + source_id * size, size)

    def copy_digested(
        self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int], seed: bytes
    ) -> tuple[bytes, ...]:
        self.copy(source, source_ids, target_ids)
        return digest_blocks(self._pool, target_ids, seed)
