"""The loopback transport: both sides in one process, with faults at chosen steps. For tests and the simulator.

A step is one block's copy, counted over the whole schedule. A read continues in a separate task, so a cancelled one
still writes, as a real one would, until its channel is destroyed.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError

NAME = "loopback"


class Fault(StrEnum):
    DROP = "drop"  # the block never arrives, without an error
    DELAY = "delay"  # it arrives when the schedule is resumed; other reads go on
    DUPLICATE = "duplicate"  # it arrives again, after the rest of its read
    REORDER = "reorder"  # it arrives after the rest of its read
    CORRUPT = "corrupt"  # one bit of it is another
    STOP = "stop"  # the exporter's process is stopped: from here on nothing arrives until the schedule is resumed
    KILL = "kill"  # the exporter's process is dead: this and every later read fails


class FaultSchedule:
    """The fault at each step, counted from 0, and the current step."""

    def __init__(self, faults: Mapping[int, Fault] | None = None) -> None:
        self._faults = dict(faults or {})
        self._step = 0
        self._killed = False
        self._running = asyncio.Event()
        self._running.set()
        self._resumed = asyncio.Event()
        self.holding = asyncio.Event()  # set as soon as a block is dropped, delayed or stopped

    def resume(self) -> None:
        """Resume what was delayed or stopped."""
        self._resumed.set()
        self._resumed = asyncio.Event()
        self._running.set()

    async def next_step(self) -> Fault | None:
        """Return the next step's fault. Waits while stopped or delayed. Raises TransportError once killed."""
        await self._running.wait()
        fault = self._faults.get(self._step)
        self._step += 1
        if fault is Fault.KILL:
            self._killed = True
        if self._killed:
            raise TransportError("the exporter is dead")
        if fault is Fault.STOP:
            self._running.clear()
        if fault in (Fault.STOP, Fault.DELAY, Fault.DROP):
            self.holding.set()
        if fault in (Fault.STOP, Fault.DELAY):
            await self._resumed.wait()
        if fault is Fault.DROP:
            await asyncio.get_running_loop().create_future()
        return fault


class LoopbackNetwork:
    """The exporters of this process, by the token of an epoch."""

    def __init__(self) -> None:
        self.pools: dict[bytes, PoolMemory] = {}


class LoopbackExporter:
    def __init__(self, *, memory: PoolMemory, network: LoopbackNetwork) -> None:
        self._memory, self._network = memory, network
        self._tokens: dict[Epoch, bytes] = {}

    @property
    def name(self) -> str:
        return NAME

    async def start(self) -> None:
        pass

    def reachable(self, importer_endpoint: bytes) -> bool:
        return True

    def grant(self, epoch: Epoch) -> bytes:
        token = self._tokens.setdefault(epoch, secrets.token_bytes(16))
        self._network.pools[token] = self._memory
        return token

    def revoke(self, epoch: Epoch) -> None:
        token = self._tokens.pop(epoch, None)
        if token is not None:
            del self._network.pools[token]

    async def close(self) -> None:
        for epoch in tuple(self._tokens):
            self.revoke(epoch)


class LoopbackImporter:
    def __init__(self, *, memory: PoolMemory, network: LoopbackNetwork, schedule: FaultSchedule | None = None) -> None:
        self._memory, self._network = memory, network
        self._schedule = schedule or FaultSchedule()
        self._channels: set[LoopbackChannel] = set()

    @property
    def name(self) -> str:
        return NAME

    def endpoint(self) -> bytes:
        return b""

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "LoopbackChannel":
        source = self._network.pools.get(exporter_endpoint)
        if source is None:
            raise TransportError("the exporter has not admitted this epoch")
        channel = LoopbackChannel(source, self._memory, self._schedule, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        for channel in tuple(self._channels):
            await channel.destroy()


class LoopbackChannel:
    """See Channel in base.py."""

    def __init__(
        self,
        source: PoolMemory,
        target: PoolMemory,
        schedule: FaultSchedule,
        ended: "Callable[[LoopbackChannel], None]",
    ) -> None:
        self._source, self._target, self._schedule = source, target, schedule
        self._ended = ended
        self._open = True
        self._read: asyncio.Task[None] | None = None  # in flight, or ended by anything but success

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        assert len(remote_block_ids) == len(local_block_ids)
        if not self._open or self._read is not None:
            raise TransportError("the channel is closed or poisoned")
        if any(block_id >= self._source.num_blocks for block_id in remote_block_ids):
            raise TransportError(f"the read names a block beyond the {self._source.num_blocks} of the exporter's pool")
        self._read = asyncio.create_task(self._copy(tuple(zip(remote_block_ids, local_block_ids, strict=True))))
        try:
            await asyncio.shield(self._read)
        except asyncio.CancelledError:
            if self._read.cancelled():  # `destroy` cancelled the copy, not the caller that waits for it
                raise TransportError("the channel was destroyed") from None
            raise
        self._read = None

    async def destroy(self) -> None:
        self._open = False
        read = self._read  # it may end and be removed in the meantime
        if read is not None:
            read.cancel()
            await asyncio.wait([read])
            if not read.cancelled():
                read.exception()
        self._ended(self)

    async def finish(self) -> None:
        await self.destroy()

    async def _copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        late: list[tuple[int, int]] = []
        for source, target in pairs:
            fault = await self._schedule.next_step()
            if fault in (Fault.REORDER, Fault.DUPLICATE):
                late.append((source, target))
            if fault is not Fault.REORDER:
                self._target.raw[target].copy_(self._source.raw[source])
            if fault is Fault.CORRUPT:
                self._target.raw[target, 0] ^= 1
        for source, target in late:
            self._target.raw[target].copy_(self._source.raw[source])
