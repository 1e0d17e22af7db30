"""Pulling a prefix helps or does nothing: whatever fails, the prompt is computed, and the holder left alone a while."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from cluster.clock import ManualClock
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import MemberId, PrefixHolder
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import keyed_chains
from kvtransfer.importer.block_source import BlockSource
from kvtransfer.importer.exporter_channels import ExporterChannels
from kvtransfer.importer.importer import Expected, Imported
from kvtransfer.importer.pairs import PairBook
from prefill_worker.prefixes.prefix_pulls import PrefixPulls, PullMeans
from prefill_worker.scheduling.commands import (
    AdmitPull,
    Command,
    DiscardPull,
    FindPrefix,
    PrefixFound,
    PullReserved,
    ReservePull,
)
from prefill_worker.scheduling.rates import RunningRate
from tandem.v1 import kv_pb2, kv_pb2_grpc
from tests.prefill_jobs import prefill_job

_BLOCK = 4
_ME, _HOLDER = MemberId("me", "1"), MemberId("holder", "1")
_TOKENS = tuple(range(41))


class _Holder(kv_pb2_grpc.KvTransferServicer):
    """Has ten blocks of anything that is asked for."""

    num_blocks = 10
    offer: kv_pb2.OfferPrefixResponse | None = None  # in place of what it has

    def __init__(self) -> None:
        self.asked: list[kv_pb2.OfferPrefixRequest] = []

    async def OfferPrefix(self, request: kv_pb2.OfferPrefixRequest, context: object) -> kv_pb2.OfferPrefixResponse:
        self.asked.append(request)
        if self.offer is not None:
            return self.offer
        return kv_pb2.OfferPrefixResponse(ticket=b"ticket" if self.num_blocks else b"", num_blocks=self.num_blocks)


@dataclass
class _Importer:
    """Reserves, and then does as it is told."""

    then: Callable[[], None] = lambda: None
    hangs: bool = False
    expected: list[Expected] = field(default_factory=list)

    async def import_blocks(
        self, *, handoff_id: int, signed_ticket: bytes, expected: Expected, blocks: BlockSource
    ) -> Imported:
        self.expected.append(expected)
        try:
            reservation = await blocks.reserve(handoff_id, expected.num_tokens // _BLOCK)
            self.then()
            if self.hangs:
                await asyncio.Event().wait()
        except (HandOffFailed, asyncio.CancelledError):
            blocks.discard(handoff_id, frozenset())
            raise
        return Imported(reservation.block_ids, (), (), "tcp", reservation.num_cached, 0, 0.0, 0.0)


class _Bench:
    def __init__(self, address: str, importer: _Importer, num_here: int = 0, has_room: bool = True) -> None:
        self.posted: list[Command] = []
        self.clock = ManualClock()
        self.telemetry = Telemetry()
        self.address = address
        self._num_here, self._has_room = num_here, has_room
        self.channels = ExporterChannels(grpc.aio.insecure_channel)
        self.compute = RunningRate()
        self.compute.note(100, 100.0)  # one token a second: pulling is worth nearly anything
        means = PullMeans(
            member=_ME,
            importer=importer,  # type: ignore[arg-type]  # a stand-in with the one method that is used
            pairs=PairBook(("tcp",)),
            channels=self.channels,
            block_size=_BLOCK,
            block_bytes=100,
            new_chain=keyed_chains(b"key", _BLOCK),
            compute=self.compute,
            pull_ids=itertools.count(),
            clock=self.clock,
            telemetry=self.telemetry,
        )
        self.pulls = PrefixPulls(means, self._post)

    async def fetch(self, holder: MemberId = _HOLDER) -> int:
        job = prefill_job(_TOKENS, max_tokens=4, prefix_holders=(PrefixHolder(holder, self.address, 40),))
        async with asyncio.timeout(30):
            return await self.pulls.fetch(job)

    def outcome(self, name: str) -> float:
        return self.telemetry.value("tandem_prefix_pulls_total", outcome=name)

    def _post(self, command: Command) -> None:
        self.posted.append(command)
        match command:
            case FindPrefix(question_id):
                self.pulls.on_event(PrefixFound(question_id, self._num_here))
            case ReservePull(pull_id, block_hashes):
                blocks = tuple(range(len(block_hashes))) if self._has_room else None
                self.pulls.on_event(PullReserved(pull_id, blocks, min(self._num_here, len(block_hashes))))


@asynccontextmanager
async def _served(holder: _Holder) -> AsyncIterator[str]:
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvTransferServicer_to_server(holder, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_what_the_holder_has_is_imported_under_the_hash_that_covers_it_and_kept() -> None:
    holder, importer = _Holder(), _Importer()
    async with _served(holder) as address:
        bench = _Bench(address, importer, num_here=3)
        assert await bench.fetch() == (10 - 3) * _BLOCK
        await bench.pulls.close()

    chain = keyed_chains(b"key", _BLOCK)("", "native")
    chain.extend(_TOKENS)
    assert holder.asked[0].block_hashes == b"".join(chain.hashes) and holder.asked[0].importer == str(_ME)
    assert importer.expected == [Expected(40, chain.hashes[9], 0)]
    assert bench.posted[-1] == AdmitPull(1, chain.parent_of(0), tuple(chain.hashes))
    assert bench.outcome("ok") == 1


def _refuse() -> None:
    raise HandOffFailed(HandOffReason.DIGEST_MISMATCH, "block 3")


@pytest.mark.parametrize(
    ("importer", "outcome"),
    [(_Importer(then=_refuse), "digest_mismatch"), (_Importer(hangs=True), "late")],
    ids=["a digest differs", "it takes longer than computing"],
)
async def test_a_pull_that_fails_computes_and_leaves_the_holder_alone_for_a_while(
    importer: _Importer, outcome: str
) -> None:
    holder = _Holder()
    async with _served(holder) as address:
        bench = _Bench(address, importer)
        bench.compute.note(10**9, 1.0)  # computing is quick: the shortest deadline
        bench.compute.note(10**9, 1.0)
        assert await bench.fetch() == 0
        assert isinstance(bench.posted[-1], DiscardPull)
        assert bench.outcome(outcome) == 1

        assert await bench.fetch() == 0
        assert len(holder.asked) == 1
        bench.clock.advance(60.0)
        await bench.fetch()
        assert len(holder.asked) == 2
        await bench.pulls.close()


async def test_a_holder_that_is_gone_or_has_too_little_costs_nothing_but_the_question() -> None:
    gone = _Bench("127.0.0.1:1", _Importer())
    assert await gone.fetch() == 0
    assert gone.outcome("unreachable") == 1
    await gone.pulls.close()

    holder = _Holder()
    holder.num_blocks = 0
    async with _served(holder) as address:
        empty = _Bench(address, _Importer())
        assert await empty.fetch() == 0
        assert empty.outcome("gone") == 1
        await empty.pulls.close()


async def test_without_room_or_with_itself_as_holder_nothing_is_pulled() -> None:
    holder = _Holder()
    async with _served(holder) as address:
        full = _Bench(address, _Importer(), has_room=False)
        assert await full.fetch() == 0
        assert full.outcome("not_enough_blocks") == 1
        assert await full.fetch(holder=_ME) == 0
        assert len(holder.asked) == 1
        await full.pulls.close()


@pytest.mark.parametrize(("ticket", "num_blocks"), [(b"ticket", 0), (b"", 3), (b"ticket", 11), (b"ticket", 1 << 31)])
async def test_an_offer_that_contradicts_itself_or_the_question_is_refused_and_the_prompt_is_computed(
    ticket: bytes, num_blocks: int
) -> None:
    """A ticket for no blocks used to raise IndexError out of `fetch`, which ended the request's prefill."""
    holder, importer = _Holder(), _Importer()
    holder.offer = kv_pb2.OfferPrefixResponse(ticket=ticket, num_blocks=num_blocks)
    async with _served(holder) as address:
        bench = _Bench(address, importer)
        assert await bench.fetch() == 0
        assert bench.outcome("malformed_message") == 1
        assert importer.expected == [] and not any(isinstance(c, ReservePull) for c in bench.posted)
        await bench.pulls.close()
