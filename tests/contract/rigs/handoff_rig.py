"""Two workers' halves of a hand-off with everything real between them: pools, gRPC on loopback, transports.

The rig replaces the two step threads: `Prefill` reserves, seals and finishes blocks of the source pool, `DecodeBlocks`
is the importer's view of the target pool. Both keep accounts in the engine's BlockPool, so `check()` is the real one.
The clocks of both sides stand still unless a test moves them, so that a machine which stops the test for seconds ends
no lease and no wait.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import grpc
import pytest
import torch

from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, ManualClock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.member import OUR_VERSIONS, ProtocolRange
from cluster.messages import LayoutFingerprint, MemberId
from cluster.settings.worker_settings import TransferSettings
from engine.kv.block_pool import BlockPool
from engine.kv.pool import KvPool
from kvtransfer.digests import KNOWN_DIGESTS
from kvtransfer.exporter.exporter import Exporter, FirstToken, TailBlock
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks, Importer
from kvtransfer.importer.links import LinkTable
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import ExporterTransport
from kvtransfer.wire.wire_format import WireDtype, WireFormat
from tandem.internal.v1 import kv_pb2_grpc
from tests.contract.rigs.handoff_parts import (
    DEADLINE_S,
    EXPORTER,
    IMPORTER,
    KEY,
    LAYOUT,
    Counters,
    DecodeBlocks,
    Read,
    WatchedTransport,
    pass_at_importer,
    transports,
)
from tests.contract.rigs.kv_pools import BLOCK_SIZE, random_pool
from tests.loopback import Fault, FaultSchedule


@dataclass
class Prefill:
    """A prefill at the exporter: the work of the step thread, at the test's pace."""

    rig: "Rig"
    ticket_id: bytes
    signed: bytes
    num_tokens: int
    num_choices: int
    prompt_hash: bytes
    block_ids: tuple[int, ...]  # in the prompt's order; the last is the tail if the prompt does not fill it
    num_sealed: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def expected(self) -> ExpectedPrompt:
        return ExpectedPrompt(self.num_tokens, self.prompt_hash, self.num_choices)

    @property
    def num_full(self) -> int:
        return self.num_tokens // BLOCK_SIZE

    def seal(self, num_blocks: int) -> None:
        first, last = self.num_sealed, self.num_sealed + num_blocks
        assert last <= self.num_full
        self.rig.exporter.seal(self.ticket_id, first_index=first, block_ids=self.block_ids[first:last])
        self.num_sealed = last

    def finish(self, ended: Sequence[bool] | None = None) -> None:
        num_valid = self.num_tokens % BLOCK_SIZE
        ends = ended or [False] * self.num_choices
        self.rig.exporter.finish(
            self.ticket_id,
            first_tokens=[FirstToken(100 + choice, end) for choice, end in enumerate(ends)],
            tail=TailBlock(self.block_ids[-1], num_valid) if num_valid else None,
        )

    def compute(self) -> None:
        """Compute the whole prompt at once."""
        if self.num_full > self.num_sealed:
            self.seal(self.num_full - self.num_sealed)
        self.finish()


@dataclass
class Rig:
    source: KvPool
    target: KvPool
    exporter: Exporter
    importer: Importer
    watched: WatchedTransport
    exporter_transport: ExporterTransport
    exporter_blocks: BlockPool
    decode: DecodeBlocks
    counters: Counters
    address: str
    arriving: PoolMemory  # what the importer's transports fill
    prefills: dict[bytes, Prefill] = field(default_factory=dict)
    unhealthy: asyncio.Event = field(default_factory=asyncio.Event)
    alternatives: list[WatchedTransport] = field(default_factory=list)
    schedule: FaultSchedule = field(default_factory=FaultSchedule)
    wire_dtype: str = "native"
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    imports: list[asyncio.Task[ImportedBlocks]] = field(default_factory=list)
    links: LinkTable = field(default_factory=lambda: LinkTable(()))  # the importer's
    exporter_clock: ManualClock = field(default_factory=ManualClock)
    importer_clock: ManualClock = field(default_factory=ManualClock)

    def prefill(self, num_tokens: int, *, num_choices: int = 1, attempt: int = 1) -> Prefill:
        """Queue and accept a prefill. Its blocks are reserved, and nothing is computed."""
        free = self.exporter_blocks.reserve(-(-num_tokens // BLOCK_SIZE))
        assert free is not None
        block_ids = tuple(self.dice.sample(free, len(free)))
        prompt_hash = self.dice.randbytes(16)
        issued = self.exporter.issue(
            request_id=f"request-{len(self.prefills)}",
            attempt=attempt,
            importer=IMPORTER,
            num_tokens=num_tokens,
            prompt_hash=prompt_hash,
            num_choices=num_choices,
        )
        self.exporter_blocks.begin_lease(block_ids)
        prefill = Prefill(self, issued.ticket_id, issued.signed, num_tokens, num_choices, prompt_hash, block_ids)
        self.prefills[issued.ticket_id] = prefill
        return prefill

    def release(self, ticket_id: bytes) -> None:
        """Do the work of Release on the step thread. A second Release for one ticket would be illegal in the
        BlockPool."""
        prefill = self.prefills[ticket_id]
        self.exporter_blocks.end_lease(prefill.block_ids)
        self.exporter_blocks.drop_references(prefill.block_ids)
        prefill.released.set()

    def start_import(
        self, prefill: Prefill, handoff_id: int = 1, *, signed: bytes = b""
    ) -> asyncio.Task[ImportedBlocks]:
        importing = asyncio.create_task(
            self.importer.import_blocks(
                handoff_id=handoff_id,
                signed_ticket=signed or prefill.signed,
                expected=prefill.expected,
                blocks=self.decode,
            )
        )
        self.imports.append(importing)
        return importing

    async def read_arrived(self) -> Read:
        """Return the newest read as soon as its bytes are in the target pool. If every import has failed, raise the
        last one's error."""
        arrived = asyncio.create_task(self.watched.read_arrived.wait())
        running = {importing for importing in self.imports if not importing.done()}
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not arrived.done():
                    done, _ = await asyncio.wait({arrived, *running}, return_when=asyncio.FIRST_COMPLETED)
                    running -= done
                    failed = done - {arrived}
                    if not arrived.done() and not running and failed:
                        await failed.pop()
        finally:
            arrived.cancel()
        self.watched.read_arrived.clear()
        return self.watched.reads[-1]

    async def failure(
        self, importing: asyncio.Task[ImportedBlocks], *, handoff_id: int = 1, match: str | None = None
    ) -> HandOffReason:
        """Return why the import failed. Nothing is reserved for it afterwards."""
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(HandOffFailed, match=match) as caught:
                await importing
        assert handoff_id not in self.decode.granted
        return caught.value.handoff_reason

    async def machine_idle(self) -> None:
        """Wait until the importer has verified everything that has arrived."""
        await asyncio.wrap_future(self.importer._verifier.submit(lambda: None))
        await asyncio.sleep(0)

    async def digested(self) -> None:
        """Wait until the exporter has digests of all sealed blocks."""
        while self.exporter._is_digesting:
            await asyncio.wrap_future(self.exporter._digester.submit(lambda: None))
            await asyncio.sleep(0)

    async def given_up(self, prefill: Prefill) -> None:
        """Release the blocks of a prefill whose importer failed or is gone. They are kept for another importer until
        the prefill is cancelled."""
        async with asyncio.timeout(DEADLINE_S):
            await self.counters.exported.wait()
            assert not prefill.released.is_set()
            self.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="")
            await prefill.released.wait()

    async def all_quiet(self) -> None:
        """Wait until no read can still write."""
        async with asyncio.timeout(DEADLINE_S):
            while self.decode.pool.counts()["quarantined"]:
                async with self.decode.changed:
                    await self.decode.changed.wait()

    def flip_a_bit(self, block_id: int) -> None:
        self.arriving.raw[block_id, -1] ^= 4

    def sent(self) -> torch.Tensor:
        """Return the source's blocks as every importer should receive them."""
        copy = KvPool(self.source.layout, self.source.num_blocks)
        copy.raw.copy_(self.source.raw)
        wire = WireDtype(self.wire_dtype).format(copy, copy.layout)
        wire.encode(range(copy.num_blocks))
        wire.decode(range(copy.num_blocks))
        return copy.raw

    def holds(self, prefill: Prefill, imported: ImportedBlocks) -> bool:
        """Return whether every block is present and equal byte for byte."""
        sent, num_full = self.sent(), prefill.num_full
        same = bool(
            (self.target.raw[list(imported.sealed_block_ids)] == sent[list(prefill.block_ids[:num_full])]).all()
        )
        tail = sent[prefill.block_ids[-1]]
        return same and all(
            bool((self.target.raw[block_id] == tail).all())
            for block_id, first in zip(imported.tail_block_ids, imported.first_tokens, strict=False)
            if not first.ended
        )

    def pass_at_exporter(self, duration_s: float) -> None:
        """Advance the exporter's clock, and let it do what is due then."""
        self.exporter_clock.advance(duration_s)
        self.exporter.reap()

    def pass_at_importer(self, duration_s: float) -> None:
        """Advance the importer's clock, and let it do what is due then."""
        pass_at_importer(self.importer, self.importer_clock, duration_s)

    def let_leases_lapse(self) -> None:
        """Let the leases of failed imports end, and with them the exporter's hold on their blocks."""
        self.pass_at_exporter(TransferSettings().lease_s)

    def check_clean(self) -> None:
        """Check that nothing is held, leased or quarantined on either side."""
        for pool in (self.exporter_blocks, self.decode.pool):
            pool.check()
            assert pool.counts()["free"] == pool.num_blocks, pool.counts()
        assert self.exporter.num_live_tickets == 0
        assert self.counters.num_quarantined == 0


class RigOptions(TypedDict, total=False):
    """The differences from two equal workers of the present version with one transport between them."""

    alternatives: Sequence[str]  # further transports, after the first
    num_blocks: int  # of each pool
    num_decode_blocks: int
    settings: TransferSettings
    importer_settings: TransferSettings  # as `settings` if it is missing
    exporter_clock: Clock
    importer_clock: Clock
    importer_layout: LayoutFingerprint
    exporter_protocol: ProtocolRange
    importer_protocol: ProtocolRange
    exporter_keys: ClusterKeys
    importer_keys: ClusterKeys
    exporter_digests: Sequence[str]
    importer_digests: Sequence[str]
    wire_dtype: str
    exporter_member: MemberId
    wall_clock: Callable[[], float]
    faults: Mapping[int, Fault]


@asynccontextmanager
async def handoff_rig(transport: str, **options: Unpack[RigOptions]) -> AsyncIterator[Rig]:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    rig = _built(transport, address, options)
    kv_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(exporter=rig.exporter), server)
    await rig.exporter.start()
    await server.start()
    async with rig.importer._channels.use(address) as channel, asyncio.timeout(DEADLINE_S):
        await channel.channel_ready()  # a test's short timeouts do not include the time of connecting
    try:
        yield rig
    finally:
        await rig.importer.close()
        await rig.exporter.close()
        await server.stop(None)
        rig.source.close()
        rig.target.close()


def _built(transport: str, address: str, options: RigOptions) -> Rig:
    num_blocks, wire_dtype = options.get("num_blocks", 32), options.get("wire_dtype", "native")
    source, target = random_pool(num_blocks, seed=1), random_pool(num_blocks, seed=2)
    if wire_dtype != "native":
        source.tensor.normal_(generator=torch.Generator().manual_seed(3))
    wires = [WireDtype(wire_dtype).format(pool, pool.layout) for pool in (source, target)]
    memories = wires[0].memory, wires[1].memory
    schedule, counters, unhealthy = FaultSchedule(options.get("faults")), Counters(), asyncio.Event()
    sides = [transports(name, *memories, schedule) for name in (transport, *options.get("alternatives", ()))]
    watched = [WatchedTransport(importer_side) for _, importer_side in sides]
    links = LinkTable([side.name for side in watched])
    exporter_sides = [exporter_side for exporter_side, _ in sides]
    clocks = ManualClock(), ManualClock()
    exporter = _exporter(
        options, address, wires[0], exporter_sides, counters, clocks[0], release=lambda ticket: rig.release(ticket)
    )
    rig = Rig(
        source,
        target,
        exporter,
        _importer(options, wires[1], watched, counters, links, unhealthy, clocks[1]),
        watched[0],
        exporter_sides[0],
        BlockPool(num_blocks),
        DecodeBlocks(options.get("num_decode_blocks", num_blocks)),
        counters,
        address,
        memories[1],
        unhealthy=unhealthy,
        alternatives=watched[1:],
        schedule=schedule,
        wire_dtype=wire_dtype,
        links=links,
        exporter_clock=clocks[0],
        importer_clock=clocks[1],
    )
    return rig


def _exporter(
    options: RigOptions,
    address: str,
    wire: WireFormat,
    sides: Sequence[ExporterTransport],
    counters: Counters,
    clock: Clock,
    release: Callable[[bytes], None],
) -> Exporter:
    return Exporter(
        member=options.get("exporter_member", EXPORTER),
        address=address,
        wire=wire,
        layout=LAYOUT,
        keys=options.get("exporter_keys", KEY),
        settings=options.get("settings", TransferSettings()),
        transports=sides,
        release=release,
        clock=options.get("exporter_clock", clock),
        counters=counters,
        wall_clock=options.get("wall_clock", lambda: 1_000.0),
        protocol=options.get("exporter_protocol", OUR_VERSIONS),
        digests=options.get("exporter_digests", KNOWN_DIGESTS),
    )


def _importer(
    options: RigOptions,
    wire: WireFormat,
    sides: Sequence[WatchedTransport],
    counters: Counters,
    links: LinkTable,
    unhealthy: asyncio.Event,
    clock: Clock,
) -> Importer:
    settings = options.get("settings", TransferSettings())
    return Importer(
        member=IMPORTER,
        links=links,
        wire=wire,
        layout=options.get("importer_layout", LAYOUT),
        block_size=BLOCK_SIZE,
        keys=options.get("importer_keys", KEY),
        settings=options.get("importer_settings", settings),
        transports=sides,
        clock=options.get("importer_clock", clock),
        counters=counters,
        unhealthy=lambda text: unhealthy.set(),
        protocol=options.get("importer_protocol", OUR_VERSIONS),
        digests=options.get("importer_digests", KNOWN_DIGESTS),
    )
