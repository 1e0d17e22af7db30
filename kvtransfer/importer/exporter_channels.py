"""gRPC channels to exporters, one per address, shared by the hand-offs with that exporter."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

_MAX_IDLE = 64


class ExporterChannels:
    """Owns the channels. An unused one is kept for the next hand-off; past a bound the longest unused is closed."""

    def __init__(self, connect: Callable[[str], grpc.aio.Channel]) -> None:
        """`connect` opens one, by address."""
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        self._idle.pop(address, None)
        self._users[address] = self._users.get(address, 0) + 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1
            if self._users[address] == 0:
                del self._users[address]
                self._idle[address] = None
            while len(self._idle) > _MAX_IDLE:
                unused, _ = self._idle.popitem(last=False)
                await self._channels.pop(unused).close()

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._idle.clear()
