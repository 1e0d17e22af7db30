"""KV over `loopback` between processes: reads wait for links and stopped exporters, fail, and have random faults."""

import asyncio
from collections.abc import Mapping
from random import Random

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError
from tests.chaos.simulated.machine.loop import Process, current
from tests.chaos.simulated.machine.network import Network
from tests.loopback import (
    Fault,
    FaultSchedule,
    LoopbackChannel,
    LoopbackExporter,
    LoopbackImporter,
    LoopbackNetwork,
)

_BLOCK_S = 0.0005  # at most, for one block
_DELAY_S = 4.0


class _Reads(FaultSchedule):
    """The fate of the blocks that one process reads from another."""

    def __init__(self, network: Network, exporter: Process, dice: Random, odds: Mapping[Fault, float]) -> None:
        super().__init__()
        self._network, self._exporter, self._importer = network, exporter, current()
        self._dice, self._odds = dice, odds

    async def next_step(self) -> Fault | None:
        await asyncio.sleep(self._network.loop.soon_s(_BLOCK_S))
        while self._is_silent():
            await self._network.until_changed()
        if self._importer.fails_reads:
            raise TransportError("this worker cannot read")
        if not self._exporter.is_alive:
            raise TransportError("the exporter is dead")
        draw = self._dice.random()
        for fault, odds in self._odds.items():
            if draw < odds:
                return await self._go_wrong(fault)
            draw -= odds
        return None

    def _is_silent(self) -> bool:
        is_stopped = self._exporter.is_alive and self._exporter.is_stopped
        return is_stopped or self._network.is_cut(self._exporter.place, self._importer.place)

    async def _go_wrong(self, fault: Fault) -> Fault:
        if fault is Fault.DROP:
            await asyncio.get_running_loop().create_future()
        if fault is Fault.DELAY:
            await asyncio.sleep(self._dice.random() * _DELAY_S)
        return fault


class Exports(LoopbackExporter):
    """The loopback transport under the name of a transport that the settings accept."""

    def __init__(self, name: str, memory: PoolMemory, pools: LoopbackNetwork, owners: dict[bytes, Process]) -> None:
        super().__init__(memory=memory, network=pools)
        self._name, self._owners = name, owners

    @property
    def name(self) -> str:
        return self._name

    def grant(self, epoch: Epoch) -> bytes:
        token = super().grant(epoch)
        self._owners[token] = current()
        return token


class Imports(LoopbackImporter):
    def __init__(
        self,
        name: str,
        memory: PoolMemory,
        pools: LoopbackNetwork,
        owners: dict[bytes, Process],
        network: Network,
        dice: Random,
        odds: Mapping[Fault, float],
    ) -> None:
        super().__init__(memory=memory, network=pools)
        self._name, self._owners, self._links, self._dice, self._odds = name, owners, network, dice, odds
        self._open: dict[LoopbackChannel, None] = {}  # in the order of their opening

    @property
    def name(self) -> str:
        return self._name

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> LoopbackChannel:
        await asyncio.sleep(self._links.latency_s())
        exporter = self._owners[exporter_endpoint]
        source = self._network.pools.get(exporter_endpoint)
        if source is None or not exporter.is_alive:
            raise TransportError("the exporter has not admitted this epoch")
        schedule = _Reads(self._links, exporter, self._dice, self._odds)
        channel = LoopbackChannel(source, self._memory, schedule, lambda ended: self._open.pop(ended, None))
        self._open[channel] = None
        return channel

    async def close(self) -> None:
        for channel in tuple(self._open):
            await channel.destroy()
