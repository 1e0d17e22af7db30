"""An importer's transport whose reads go wrong now and then, in every way that a network or a peer can do it.

Each channel throws the dice once per read. What a fault does to the bytes or to the time is real: damaged blocks lie in
the pool, stalled reads hold their destination, late ones outlive the exporter's lease.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import Channel, ImporterTransport, TransportError


class Fault(StrEnum):
    FLIPPED = "flipped"  # one bit of one block
    MIXED_UP = "mixed_up"  # a block of another place
    TRUNCATED = "truncated"  # half of it came, then the peer was gone
    BROKEN = "broken"  # an error after everything was written
    STALLED = "stalled"  # never ends by itself
    LATE = "late"  # past every lease
    DOUBLED = "doubled"  # written twice
    REFUSED = "refused"  # the channel does not open


class FaultyTransport:
    """`rate`: the share of reads with a fault. Counts what it did."""

    def __init__(self, inner: ImporterTransport, memory: PoolMemory, *, rate: float, seed: int, late_s: float) -> None:
        self._inner, self._memory = inner, memory
        self.rate, self.late_s = rate, late_s
        self.dice = random.Random(seed)
        self.done: Counter[Fault] = Counter()

    @property
    def name(self) -> str:
        return self._inner.name

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    async def open(self, epoch: Epoch, exporter_endpoint: bytes) -> "FaultyChannel":
        fault = self.throw()
        if fault is Fault.REFUSED:
            self.done[fault] += 1
            raise TransportError("injected: the channel does not open")
        return FaultyChannel(self, await self._inner.open(epoch, exporter_endpoint), fault)

    async def close(self) -> None:
        await self._inner.close()

    def throw(self) -> Fault | None:
        return self.dice.choice(list(Fault)) if self.dice.random() < self.rate else None

    def flip(self, block_id: int) -> None:
        place = self.dice.randrange(self._memory.block_bytes)
        self._memory.raw[block_id, place] ^= 1 << self.dice.randrange(8)

    def mix_up(self, one: int, other: int) -> None:
        self._memory.raw[one] = self._memory.raw[other].clone()


class FaultyChannel:
    """The first read has the fault that was thrown for it at opening, so that opening and reading are one throw."""

    def __init__(self, transport: FaultyTransport, inner: Channel, fault: Fault | None) -> None:
        self._transport, self._inner, self._fault = transport, inner, fault
        self._has_read = False

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        fault = self._transport.throw() if self._has_read else self._fault
        self._has_read = True
        if fault is None or fault is Fault.REFUSED:
            await self._inner.read(remote_block_ids, local_block_ids)
            return
        self._transport.done[fault] += 1
        await self._faulty(fault)(remote_block_ids, local_block_ids)

    async def destroy(self) -> None:
        await self._inner.destroy()

    async def release(self) -> None:
        await self._inner.release()

    def _faulty(self, fault: Fault) -> Callable[[Sequence[int], Sequence[int]], Awaitable[None]]:
        return {
            Fault.FLIPPED: self._flipped,
            Fault.MIXED_UP: self._mixed_up,
            Fault.TRUNCATED: self._truncated,
            Fault.BROKEN: self._broken,
            Fault.STALLED: self._stalled,
            Fault.LATE: self._late,
            Fault.DOUBLED: self._doubled,
        }[fault]

    async def _flipped(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        self._transport.flip(self._transport.dice.choice(local))

    async def _mixed_up(self, remote: Sequence[int], local: Sequence[int]) -> None:
        await self._inner.read(remote, local)
        if len(local) > 1:
            self._transport.mix_up(*self._transport.dice.sample(list(local), 2))
        else:
            self._transport.flip(local[0])

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
