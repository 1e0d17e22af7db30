"""An exporter and an importer of the transport `nccl` in one process, whose libraries are sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch

from cluster.messages import Epoch, MemberId
from engine.kv.pool import KvPool
from kvtransfer.transports.nccl.communicator_life import CommunicatorLimits
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.transport import NcclChannel, NcclImporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import PROOFS
from tests.contract.rigs.socket_nccl import SocketNccl

NUM_BLOCKS = 16
DEADLINE_S = 20.0
# Long where a test must not run into it, short where it waits for it.
LIMITS = CommunicatorLimits(abort_s=2.0, grace_s=0.05, look_s=0.02, retry_s=60.0)


def epoch(number: int) -> Epoch:
    return Epoch(MemberId("p0", "a1"), bytes([number]) * 16, 1)


@dataclass
class Side:
    """An exporter and an importer, each with its own library and pool."""

    exports: SocketNccl
    imports: SocketNccl
    source: KvPool
    target: KvPool
    exporter: NcclExporter
    importer: NcclImporter

    async def open_channel(self, number: int = 1) -> NcclChannel:
        return await self.importer.open_channel(epoch(number), self.exporter.grant(epoch(number)))

    async def moves_blocks(self, number: int = 1) -> bool:
        self.target.raw.zero_()
        channel = await self.open_channel(number)
        await channel.read([3, 4, 9], [1, 2, 0])
        await channel.finish()
        return torch.equal(self.target.raw[[1, 2, 0]], self.source.raw[[3, 4, 9]])


@asynccontextmanager
async def sides(
    limits: CommunicatorLimits = LIMITS,
    *,
    exports: SocketNccl | None = None,
    imports: SocketNccl | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> AsyncIterator[Side]:
    exports, imports = exports or SocketNccl(), imports or SocketNccl()
    source, target = random_pool(num_blocks, seed=1), random_pool(num_blocks, seed=2)
    exporter = NcclExporter(
        memory=source, proofs=PROOFS, library=exports, host="127.0.0.1", advertise_host="127.0.0.1", limits=limits
    )
    importer = NcclImporter(memory=target, proofs=PROOFS, library=imports, limits=limits)
    await exporter.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Side(exports, imports, source, target, exporter, importer)
    finally:
        exports.end()
        imports.end()
        await importer.close()
        await exporter.close()


class Libraries(TypedDict, total=False):
    exports: SocketNccl
    imports: SocketNccl


def only(who: str, library: SocketNccl) -> Libraries:
    return {"exports": library} if who == "exports" else {"imports": library}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  (threads bring it about)
            await asyncio.sleep(0.005)
