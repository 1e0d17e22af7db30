"""A worker without its model: a real pool of bytes and its accounts, with the real exporter and importer over it.

The class replaces only the step thread: it reserves, writes, seals, keeps, shares and frees. Freed blocks are
overwritten at once, so that a read of a block that no longer belongs to the ticket finds other bytes.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from cluster.auth.keys import ClusterKeys
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.settings.worker_settings import TransferSettings
from engine.kv.block_pool import BlockPool, BlockState
from engine.kv.pool import KvPool
from kvtransfer.exporter import exporter as exporter_module
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer import importer as importer_module
from kvtransfer.importer.importer import Importer
from kvtransfer.memory import Reservation
from kvtransfer.wire.wire_format import NativeFormat
from tests.chaos.simulated.machine.loop import Threads
from tests.contract.rigs.handoff_calls import Calls
from tests.contract.rigs.handoff_parts import Counters
from tests.contract.rigs.kv_pools import BLOCK_SIZE, LAYOUT, random_pool
from tests.loopback import (
    FaultSchedule,
    LoopbackChannel,
    LoopbackExporter,
    LoopbackImporter,
    LoopbackNetwork,
)

KEY = ClusterKeys(b"k" * 32)
ROOT = b"root"
_FREED = 0xEE  # every byte of a free block
_FINGERPRINT = LayoutFingerprint("weights", "config", "float32", "table")


class _Exports(LoopbackExporter):
    """Loopback under another name, so that there are two transports between the same pools."""

    def __init__(self, name: str, memory: KvPool, network: LoopbackNetwork) -> None:
        super().__init__(memory=memory, network=network)
        self._name = name

    @property
    def name(self) -> str:
        return self._name


class _Imports(LoopbackImporter):
    """Loopback under another name, which checks the destination of each read before it begins."""

    def __init__(
        self,
        name: str,
        memory: KvPool,
        network: LoopbackNetwork,
        schedule: FaultSchedule,
        check_destination: Callable[[int], None],
    ) -> None:
        super().__init__(memory=memory, network=network, schedule=schedule)
        self._name, self._check_destination = name, check_destination

    @property
    def name(self) -> str:
        return self._name

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> LoopbackChannel:
        channel = await super().open_channel(epoch, exporter_endpoint)
        read = channel.read

        async def looked_at(remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
            for block_id in local_block_ids:
                self._check_destination(block_id)
            await read(remote_block_ids, local_block_ids)

        channel.read = looked_at  # type: ignore[method-assign]
        return channel


class LoopClock:
    """The clock of one worker: the loop's time plus `ahead_s`."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


@dataclass
class Claim:
    num_blocks: int
    hashes: Sequence[bytes]
    granted: "asyncio.Future[Reservation]"


class Worker:
    """A worker without its model. `address`: by which `connect` finds it; the successor of a dead worker has another
    one.
    """

    def __init__(
        self,
        *,
        member: MemberId,
        num_blocks: int,
        settings: TransferSettings,
        network: LoopbackNetwork,
        schedules: Mapping[str, FaultSchedule],  # by transport, best first
        connect: Callable[[str], Calls],
    ) -> None:
        self.member, self.address = member, str(member)
        self.settings = settings
        self.pool = BlockPool(num_blocks)
        self.memory: KvPool = random_pool(num_blocks, seed=1)
        self.clock, self.counters = LoopClock(), Counters()
        self.memory.raw.fill_(_FREED)
        self.is_dead = False
        self._violations: list[str] = []
        self._claims: dict[int, Claim] = {}  # oldest first
        self._granted: dict[int, Reservation] = {}
        self._leased: dict[bytes, tuple[int, ...]] = {}
        with (
            mock.patch.object(exporter_module, "ThreadPoolExecutor", side_effect=Threads),
            mock.patch.object(importer_module, "ThreadPoolExecutor", side_effect=Threads),
        ):
            self.exporter = Exporter(
                member=member,
                address=self.address,
                wire=NativeFormat(self.memory),
                layout=_FINGERPRINT,
                keys=KEY,
                settings=settings,
                transports=[_Exports(name, self.memory, network) for name in schedules],
                release=self._release,
                clock=self.clock,
                counters=self.counters,
                wall_clock=lambda: 1_000.0,
            )
            self.importer = Importer(
                member=member,
                wire=NativeFormat(self.memory),
                layout=_FINGERPRINT,
                block_size=BLOCK_SIZE,
                keys=KEY,
                settings=settings,
                transports=[
                    _Imports(name, self.memory, network, schedule, self._check_destination)
                    for name, schedule in schedules.items()
                ],
                clock=LoopClock(),
                counters=self.counters,
                connect=connect,  # type: ignore[arg-type]
            )
        self.calls = Calls(KvTransferServicer(exporter=self.exporter))

    # The step thread's part

    def begin(self, ticket_id: bytes, hashes: Sequence[bytes], num_blocks: int) -> Reservation | None:
        """Lease all blocks of a prompt and return them. Leading blocks that are cached here are shared. None: there is
        no room.
        """
        found = self.pool.find(hashes)
        block_ids = self.pool.reserve_beside(found, num_blocks - len(found))
        if block_ids is not None:
            self.pool.begin_lease(block_ids)
            self._leased[ticket_id] = block_ids
            return Reservation(block_ids, len(found))
        return None

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            self.memory.raw[block_id] = _bytes(content)

    def holds(self, block_id: int, content: bytes) -> bool:
        return bool((self.memory.raw[block_id] == _bytes(content)).all())

    def let_go(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block, and overwrite the blocks that become free."""
        self.pool.drop_references(block_ids)
        self._freed(block_ids)

    def _release(self, ticket_id: bytes) -> None:
        """Release the blocks of a ticket. Raises KeyError for a ticket that was released before."""
        block_ids = self._leased.pop(ticket_id)
        self.pool.end_lease(block_ids)
        self._freed(block_ids)

    def _freed(self, block_ids: Sequence[int]) -> None:
        for block_id in set(block_ids):
            if self.pool.state(block_id) == BlockState.FREE:
                self.memory.raw[block_id] = _FREED
        self._grant()

    # BlockSource: whole reservations, oldest first

    def expect(self, handoff_id: int, hashes: Sequence[bytes]) -> None:
        """Register the hashes by which the blocks of a hand-off may be found."""
        self._claims[handoff_id] = Claim(0, hashes, asyncio.get_running_loop().create_future())

    async def reserve(self, handoff_id: int, num_blocks: int, *, is_announced: bool) -> Reservation:
        if num_blocks > self.pool.num_blocks:
            raise HandOffFailed(HandOffReason.NOT_ENOUGH_BLOCKS, f"{num_blocks} of {self.pool.num_blocks}")
        claim = self._claims.pop(handoff_id)
        claim.num_blocks = num_blocks
        self._claims[handoff_id] = claim  # the youngest
        self._grant()
        return await asyncio.shield(claim.granted)

    def announce(self, handoff_id: int) -> None:
        pass

    def discard(self, handoff_id: int, quarantined: frozenset[int]) -> None:
        self._claims.pop(handoff_id, None)
        reservation = self._granted.pop(handoff_id, None)
        if reservation is not None:
            assert quarantined.isdisjoint(reservation.block_ids[: reservation.num_cached]), (
                "shared blocks are read into"
            )
            self.pool.quarantine(sorted(quarantined), handoff_id)
            self.let_go([block_id for block_id in reservation.block_ids if block_id not in quarantined])

    def release_quarantined(self, block_ids: frozenset[int]) -> None:
        self.pool.end_quarantine(sorted(block_ids))
        self._freed(sorted(block_ids))

    def forget(self, handoff_id: int) -> None:
        """Remove a hand-off that ended before it reserved blocks."""
        self._claims.pop(handoff_id, None)

    def take(self, handoff_id: int) -> tuple[int, ...]:
        """Pass the references of a hand-off to its sequence."""
        return self._granted.pop(handoff_id).block_ids

    def _grant(self) -> None:
        for handoff_id, claim in tuple(self._claims.items()):
            if claim.num_blocks == 0:
                continue  # it has not asked yet
            found = self.pool.find(claim.hashes)[: claim.num_blocks]
            block_ids = self.pool.reserve_beside(found, claim.num_blocks - len(found))
            if block_ids is None:
                return  # no later hand-off overtakes
            del self._claims[handoff_id]
            self._granted[handoff_id] = Reservation(block_ids, len(found))
            claim.granted.set_result(self._granted[handoff_id])

    def _check_destination(self, block_id: int) -> None:
        """Record a violation for `check`: an exception here would look like a failure of the transport."""
        owners = [r for r in self._granted.values() if block_id in r.block_ids[r.num_cached :]]
        if len(owners) != 1:
            self._violations.append(f"a read into block {block_id}, reserved for {len(owners)} readers")

    # Life and death

    async def die(self) -> None:
        """Stop all activity of the worker without notice to the others."""
        self.is_dead = True
        self.calls.die()
        for run in tuple(self.importer._runs.values()):
            await run.abandon()

    def check(self) -> None:
        assert not self._violations, self._violations
        free = [block_id for block_id in range(self.pool.num_blocks) if self.pool.state(block_id) == BlockState.FREE]
        assert bool((self.memory.raw[free] == _FREED).all()), "a free block was written to"
        self.pool.check()
        leases = Counter(block_id for block_ids in self._leased.values() for block_id in block_ids)
        self.pool.check_leases(leases)
        assert self.counters.num_quarantined == self.pool.counts()["quarantined"]

    def check_idle(self) -> None:
        """Assert that no block is held, leased or quarantined."""
        self.check()
        counts = self.pool.counts()
        assert counts["free"] + counts["cached"] == self.pool.num_blocks, counts
        assert self.exporter.num_live_tickets == 0 and self.importer.num_live == 0
        assert not self._claims and not self._granted


def content_of(*parts: object) -> bytes:
    """Return the content of a block with this prompt and place, which is also its hash."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).repeat(LAYOUT.block_bytes // len(content))
