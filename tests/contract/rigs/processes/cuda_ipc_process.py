"""An exporter of a GPU pool in a separate process. Not a test: tests/contract/transports/test_cuda_ipc.py starts it.

Prints its endpoint, then serves until its input ends. With an argument its pool has that number of blocks, and is zero.
"""

import asyncio
import sys

import torch

from cluster.messages import Epoch, MemberId
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool
from kvtransfer.transports.cuda.transport import CudaAccess, CudaIpcExporter
from tests.contract.rigs.proofs import PROOFS

NUM_BLOCKS = 512
LAYOUT = lay_out([LayerShape(num_kv_heads=8, key_dim=128, value_dim=128)] * 32, 16, "bfloat16")  # 2 MiB a block
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)


def patterned_pool(seed: int) -> KvPool:
    """Return a pool in which each block's bytes identify the block."""
    pool = KvPool(LAYOUT, NUM_BLOCKS, "cuda")
    words = pool.raw.view(torch.int32)
    rows = torch.arange(NUM_BLOCKS, device="cuda", dtype=torch.int32)[:, None] * 7919 + seed
    words.copy_(rows + torch.arange(words.shape[1], device="cuda", dtype=torch.int32)[None, :])
    torch.cuda.synchronize()
    return pool


async def main() -> None:
    pool = KvPool(LAYOUT, int(sys.argv[1]), "cuda") if sys.argv[1:] else patterned_pool(seed=1)
    exporter = CudaIpcExporter(memory=pool, proofs=PROOFS, access=CudaAccess(pool))
    await exporter.start()
    print(exporter.grant(EPOCH).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await exporter.close()


if __name__ == "__main__":
    asyncio.run(main())
