"""An importer's transport whose reads fail on demand in every way that a network or a peer can cause.

It asks its `FaultSource` once per channel and once per further read. The effect on bytes and time is real: damaged
blocks lie in the pool, stalled reads hold their destination, late ones outlive the lease.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import Channel, ImporterTransport, TransportError


class Fault(StrEnum):
    FLIPPED = "flipped"  # one bit of one block
    MIXED_UP = "mixed_up"  # a block of another place: what reordered messages would leave
    TRUNCATED = "truncated"  # half of it came, then the peer was gone
    BROKEN = "broken"  # an error after everything was written
    STALLED = "stalled"  # never ends by itself
    LATE = "late"  # past every lease
    DOUBLED = "doubled"  # written twice
    REFUSED = "refused"  # the channel does not open
    HELD = "held"  # begins when the source orders it


class FaultSource(Protocol):
    """Decides when a read fails, and receives the injected faults."""

    def next(self, transport: str) -> Fault | None: ...

    def injected(self, fault: Fault) -> None: ...

    async def may_go_on(self) -> None:
        """Wait until a HELD read may continue."""
        ...


class Always:
    """Injects one fault into every read, or only while a file exists."""

    def __init__(self, fault: Fault, while_exists: str | None = None) -> None:
        self._fault, self._file = fault, while_exists

    def next(self, transport: str) -> Fault | None:
        return self._fault if self._file is None or os.path.exists(self._file) else None

    def injected(self, fault: Fault) -> None:
        pass

    async def may_go_on(self) -> None:
        raise AssertionError("nothing holds a read")


class Dice:
    """Injects a fault into a share of all reads, and counts them."""

    KINDS = tuple(fault for fault in Fault if fault is not Fault.HELD)

    def __init__(self, *, rate: float, seed: int) -> None:
        self._rate, self._numbers = rate, random.Random(seed)
        self.counted: Counter[Fault] = Counter()

    def next(self, transport: str) -> Fault | None:
        return self._numbers.choice(self.KINDS) if self._numbers.random() < self._rate else None

    def injected(self, fault: Fault) -> None:
        self.counted[fault] += 1

    async def may_go_on(self) -> None:
        raise AssertionError("dice hold nothing")


class FaultyTransport:
    """A transport with injected faults. `late_s`: the delay of a LATE read."""

    def __init__(self, inner: ImporterTransport, memory: PoolMemory, source: FaultSource, *, late_s: float) -> None:
        self._inner, self._memory = inner, memory
        self.source, self.late_s = source, late_s
        self._numbers = random.Random(11)

    @property
    def name(self) -> str:
        return self._inner.name

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "FaultyChannel":
        fault = self.source.next(self.name)
        if fault is Fault.REFUSED:
            self.source.injected(fault)
            raise TransportError("injected: the channel does not open")
        return FaultyChannel(self, await self._inner.open_channel(epoch, exporter_endpoint), fault)

    async def close(self) -> None:
        await self._inner.close()

    def flip(self, block_ids: Sequence[int]) -> None:
        place = self._numbers.randrange(self._memory.block_bytes)
        self._memory.raw[self._numbers.choice(block_ids), place] ^= 1 << self._numbers.randrange(8)

    def mix_up(self, block_ids: Sequence[int]) -> None:
        one, other = self._numbers.sample(list(block_ids), 2)
        self._memory.raw[one] = self._memory.raw[other].clone()


class FaultyChannel:
    """A channel whose first read has the fault that was drawn when it was opened."""

    def __init__(self, transport: FaultyTransport, inner: Channel, fault: Fault | None) -> None:
        self._transport, self._inner, self._fault = transport, inner, fault
        self._has_read = False

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        fault = self._transport.source.next(self._transport.name) if self._has_read else self._fault
        self._has_read = True
        if fault is None or fault is Fault.REFUSED:
            await self._inner.read(remote_block_ids, local_block_ids)
            return
        self._transport.source.injected(fault)
        await self._faulty(fault)(remote_block_ids, local_block_ids)

    async def destroy(self) -> None:
        await self._inner.destroy()

    async def finish(self) -> None:
        await self._inner.finish()

    def _faulty(self, fault: Fault) -> Callable[[Sequence[int], Sequence[int]], Awaitable[None]]:
        return {
            Fault.FLIPPED: self._flipped,
            Fault.MIXED_UP: self._mixed_up,
            Fault.TRUNCATED: self._truncated,
            Fault.BROKEN: self._broken,
            Fault.STALLED: self._stalled,
            Fault.LATE: self._late,
            Fault.DOUBLED: self._doubled,
            Fault.HELD: self._held,
        }[fault]

    async def _flipped(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        self._transport.flip(local)

    async def _mixed_up(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        if len(local) > 1:
            self._transport.mix_up(local)
        else:
            self._transport.flip(local)

    async def _truncated(self, remote: Sequence[int], local: Sequence[int]) -> None:
        half = len(local) // 2
        if half:
            await self._inner.read(remote[:half], local[:half])
        raise TransportError("injected: the peer ended the connection")

    async def _broken(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        raise TransportError("injected: an error after the last byte")

    async def _stalled(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        await asyncio.get_running_loop().create_future()

    async def _late(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await asyncio.sleep(self._transport.late_s)
        await self._inner.read(remote, local)

    async def _doubled(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        await self._inner.read(remote, local)

    async def _held(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._transport.source.may_go_on()
        await self._inner.read(remote, local)
