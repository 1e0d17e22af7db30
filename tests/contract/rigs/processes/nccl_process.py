"""An exporter over the real NCCL in a separate process. Not a test: tests/contract/transports/test_nccl_wheels.py
starts it.

Prints one endpoint per line, then serves until its input ends. The pool is on the GPU if there is one.
"""

import asyncio
import sys

import torch

from engine.kv.pool import KvPool
from kvtransfer.transports.nccl.communicator_life import CommunicatorLimits
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.library import cupy_nccl
from tests.contract.rigs.kv_pools import LAYOUT, random_pool
from tests.contract.rigs.nccl_sides import NUM_BLOCKS, epoch
from tests.contract.rigs.proofs import PROOFS

NUM_EPOCHS = 8
LIMITS = CommunicatorLimits(agree_s=10.0, initialise_s=30.0, warm_s=20.0, transfer_s=20.0, retry_s=300.0)


def device_pool(seed: int) -> KvPool:
    """Return a pool of random bytes that depend on the seed only, not on the device."""
    host = random_pool(NUM_BLOCKS, seed=seed)
    if not torch.cuda.is_available():
        return host
    pool = KvPool(LAYOUT, NUM_BLOCKS, "cuda")
    pool.raw.copy_(host.raw)
    torch.cuda.synchronize()
    return pool


async def main() -> None:
    exporter = NcclExporter(
        memory=device_pool(seed=1),
        proofs=PROOFS,
        library=cupy_nccl(0),
        host="127.0.0.1",
        advertise_host="127.0.0.1",
        limits=LIMITS,
    )
    await exporter.start()
    for number in range(NUM_EPOCHS):
        print(exporter.grant(epoch(number)).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await exporter.close()


if __name__ == "__main__":
    asyncio.run(main())
