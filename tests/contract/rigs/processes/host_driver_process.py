"""The two sides of an exported pool, a process each: the real cuda-bindings over host_driver.c beside it.

Not a test: tests/contract/transports/test_cuda_bindings.py starts it.

`export` prints its endpoint and serves until its input ends. `import` reads one from its input, prints the content that
it maps, and prints it again at every further line.
"""

import asyncio
import ctypes
import sys

from cluster import shared_memory
from cluster.messages import Epoch, MemberId
from engine.kv import pool
from kvtransfer.transports.cuda import transport as cuda_ipc
from kvtransfer.transports.proven_connections import Opening
from kvtransfer.transports.shm.pool_file import GEOMETRY, PoolFileExporter, parse_endpoint, receive_descriptor
from tests.contract.rigs.proofs import PROOFS

NUM_BYTES = 3 << 20
BYTE = 0x5A
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)


async def export() -> None:
    file, size, address = pool._allocate(NUM_BYTES, 0)
    assert size == 4 << 20
    ctypes.memset(address, BYTE, size)
    server = PoolFileExporter(PROOFS, file, 1, size, size)
    await server.start()
    _say(server.grant(EPOCH).hex())
    await asyncio.to_thread(sys.stdin.read)


async def import_() -> None:
    from cuda.bindings import driver

    path, token = parse_endpoint(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
    _, geometry, file = await receive_descriptor(
        path, EPOCH, token, Opening(PROOFS, PoolFileExporter.name, EPOCH.exporter)
    )
    _, _, size = GEOMETRY.unpack(geometry)
    address = cuda_ipc._import_for_reading(driver, file, size, 0)
    for _ in range(2):
        _say(f"{_protection(address)} {ctypes.string_at(address, size) == bytes([BYTE]) * size}")
        await asyncio.to_thread(sys.stdin.readline)
    shared_memory.unmap_pages(address, size)
    _say(_protection(address))


def _protection(address: int) -> str:
    """Return the protection that the kernel reports; empty if nothing is mapped."""
    with open("/proc/self/maps") as maps:
        return next((line.split()[1] for line in maps if line.startswith(f"{address:x}-")), "")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    asyncio.run({"export": export, "import": import_}[sys.argv[1]]())
