"""A link of the transport `nixl` whose agent fails in a way that the library itself does not."""

import asyncio
import threading
from typing import ClassVar

import pytest
import torch

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl import link as nixl_link
from kvtransfer.transports.nixl.agent import Descriptors, Region
from kvtransfer.transports.nixl.exporting import TOKEN_BYTES, NixlEndpoint
from kvtransfer.transports.nixl.link import NixlLink

DEADLINE_S = 20.0


class ShortOfMemory:
    """An agent whose reads complete at once until `is_short` is set. From then on none completes, and memory is too
    short to ask whether one has."""

    made: ClassVar["list[ShortOfMemory]"] = []

    def __init__(self, name: str, device: int | None) -> None:
        self.is_short = False
        self.destroyed = threading.Event()
        self.made.append(self)

    def register(self, region: Region) -> None:
        pass

    def connect(self, metadata: bytes) -> None:
        pass

    def start_read(self, there: tuple[Region, Descriptors], here: tuple[Region, Descriptors]) -> int:
        return 1

    def is_complete(self, number: int) -> bool:
        if self.is_short:
            raise MemoryError
        return True

    def destroy(self) -> None:
        self.destroyed.set()


async def test_a_read_that_fails_on_the_event_loop_ends_with_its_agent_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The read has started by then, and only the end of the agent proves that it writes nothing more."""
    monkeypatch.setattr(nixl_link, "NixlAgent", ShortOfMemory)
    ShortOfMemory.made.clear()
    rows, admissions = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, TOKEN_BYTES, dtype=torch.uint8)
    there = NixlEndpoint(0, bytes(TOKEN_BYTES), Region.of(rows), Region.of(admissions), b"metadata")
    link = NixlLink(pool=Region.of(rows), there=there, timeout_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wrap_future(link.read([0], [0]))  # by the thread, like every first read
        (agent,) = ShortOfMemory.made
        agent.is_short = True
        with pytest.raises(TransportError, match="MemoryError"):
            await asyncio.wrap_future(link.read([1], [1]))
        assert agent.destroyed.is_set() and not link.is_open
        await link.destroyed()
