"""The transport `cuda_ipc` between GPUs of one host. The importer maps the exporter's pages for reading and copies from
device to device.

The pages are passed as a file. CUDA's virtual memory management keeps exported pages while any process maps them, so a
copy in flight when the exporter dies reads what was sealed, and ends. The connection that carried the file ends with
the exporter; that ends the mapping, and so the pages.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from kvtransfer.memory import ExportedMemory, PoolMemory
from kvtransfer.transports.base import TransportSetup
from kvtransfer.transports.cuda.access import CudaAccess, Mapping, PoolAccess
from kvtransfer.transports.shm.pool_file import PoolFileExporter, PoolFileImporter
from kvtransfer.transports.shm.transport import host_identity

NAME = "cuda_ipc"


def unavailable(setup: TransportSetup) -> str:
    memory = setup.memory
    if not isinstance(memory, ExportedMemory):
        return "the memory to transfer is not exported GPU memory"
    return memory.why_no_cuda_file


def exporter(setup: TransportSetup) -> "CudaIpcExporter":
    assert isinstance(setup.memory, ExportedMemory)
    return CudaIpcExporter(memory=setup.memory, access=CudaAccess(setup.memory))


def importer(setup: TransportSetup) -> "CudaIpcImporter":
    return CudaIpcImporter(memory=setup.memory, access=CudaAccess(setup.memory))


class CudaIpcExporter(PoolFileExporter):
    """Passes the pool's file to importers of admitted epochs."""

    name = NAME

    def __init__(self, *, memory: ExportedMemory, access: PoolAccess) -> None:
        assert memory.cuda_file is not None, memory.why_no_cuda_file
        super().__init__(memory.cuda_file, memory.num_blocks, memory.block_bytes, memory.cuda_file_bytes)
        self._access = access

    def reachable(self, importer_endpoint: bytes) -> bool:
        host, _, device = importer_endpoint.rpartition(b" ")
        return host == host_identity() and self._access.reaches(device.decode(errors="replace"))


class CudaIpcImporter(PoolFileImporter[Mapping]):
    name = NAME

    def __init__(self, *, memory: PoolMemory, access: PoolAccess) -> None:
        super().__init__(memory, NAME)
        self._access = access
        self._endpoint = host_identity() + b" " + access.device().encode()

    def endpoint(self) -> bytes:
        return self._endpoint

    async def map(self, file: int, num_blocks: int, num_bytes: int) -> Mapping:
        mapping = asyncio.get_running_loop().run_in_executor(self._threads, self._access.map, file, num_bytes)
        return await asyncio.shield(mapping)  # otherwise the file would never be closed

    def start_copy(self, source: Mapping, source_ids: Sequence[int], target_ids: Sequence[int]) -> Future[None]:
        return self._threads.submit(self._access.copy, source, tuple(source_ids), tuple(target_ids))
