"""A pull is best-effort: when it fails, the prompt is computed and the source is avoided for a while."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from cluster.clock import ManualClock
from cluster.errors import HandOffFailed, HandOffReason, Overloaded, TandemError
from cluster.messages import MemberId, PrefixSource
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import keyed_chains
from cluster.serving.rpc_errors import ErrorInterceptor
from engine.scheduling.cache_commands import AdmitPull, FindPrefix, PrefixFound, PullReserved, ReservePull
from engine.scheduling.commands import Command, Discard
from engine.steps.questions import Questions
from kvtransfer.importer.calls import GrpcChannelPool
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks
from kvtransfer.importer.links import LinkTable
from kvtransfer.memory import BlockSource
from prefill_worker.prefixes.prefix_pulls import PrefixPulls, PullResources
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc
from tests.prefill_jobs import prefill_job

_BLOCK = 4
_ME, _SOURCE = MemberId("me", "1"), MemberId("source", "1")
_TOKENS = tuple(range(41))


class _Source(kv_pb2_grpc.KvTransferServicer):
    """A source with ten blocks of every requested prefix."""

    num_blocks = 10
    response: kv_pb2.LeasePrefixResponse | None = None  # in place of what it has
    refusal: TandemError | None = None

    def __init__(self) -> None:
        self.asked: list[kv_pb2.LeasePrefixRequest] = []

    async def LeasePrefix(self, request: kv_pb2.LeasePrefixRequest, context: object) -> kv_pb2.LeasePrefixResponse:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.response is not None:
            return self.response
        return kv_pb2.LeasePrefixResponse(ticket=b"ticket" if self.num_blocks else b"", num_blocks=self.num_blocks)


@dataclass
class _Importer:
    """An importer that reserves blocks and then calls `then`, hangs or returns."""

    then: Callable[[], None] = lambda: None
    hangs: bool = False
    expected: list[ExpectedPrompt] = field(default_factory=list)

    async def import_blocks(
        self, *, handoff_id: int, signed_ticket: bytes, expected: ExpectedPrompt, blocks: BlockSource
    ) -> ImportedBlocks:
        self.expected.append(expected)
        try:
            reservation = await blocks.reserve(handoff_id, expected.num_tokens // _BLOCK, is_announced=True)
            self.then()
            if self.hangs:
                await asyncio.Event().wait()
        except (HandOffFailed, asyncio.CancelledError):
            blocks.discard(handoff_id, frozenset())
            raise
        return ImportedBlocks(reservation.block_ids, (), (), "tcp", reservation.num_cached, 0, 0.0, 0.0, 0.0)


class _Bench:
    def __init__(self, address: str, importer: _Importer, num_here: int = 0, has_room: bool = True) -> None:
        self.posted: list[Command] = []
        self.questions = Questions(self._post)
        self.clock = ManualClock()
        self.telemetry = Telemetry()
        self.address = address
        self._num_here, self._has_room = num_here, has_room
        self.channels = GrpcChannelPool(grpc.aio.insecure_channel)
        self.token_s = 1.0  # pulling is worth nearly anything
        means = PullResources(
            member=_ME,
            importer=importer,  # type: ignore[arg-type]  # a stand-in with the one method that is used
            links=LinkTable(("tcp",)),
            channels=self.channels,
            block_size=_BLOCK,
            block_bytes=100,
            new_chain=keyed_chains(b"key", _BLOCK),
            compute_s=lambda num_tokens, num_before: self.token_s * num_tokens,
            pull_ids=itertools.count(),
            clock=self.clock,
            telemetry=self.telemetry,
        )
        self.pulls = PrefixPulls(means, self.questions)

    async def fetch(self, source: MemberId = _SOURCE) -> int:
        job = prefill_job(_TOKENS, max_tokens=4, prefix_sources=(PrefixSource(source, self.address, 40),))
        async with asyncio.timeout(30):
            return await self.pulls.pull(job)

    def outcome(self, name: str) -> float:
        return self.telemetry.value("tandem_prefix_pulls_total", outcome=name)

    def _post(self, command: Command) -> None:
        self.posted.append(command)
        match command:
            case FindPrefix(question_id):
                self.questions.settle((PrefixFound(question_id, self._num_here),))
            case ReservePull(pull_id, block_hashes):
                blocks = tuple(range(len(block_hashes))) if self._has_room else None
                self.questions.settle((PullReserved(pull_id, blocks, min(self._num_here, len(block_hashes))),))


@asynccontextmanager
async def _served(source: _Source) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(Telemetry())])  # as in every worker's server
    kv_pb2_grpc.add_KvTransferServicer_to_server(source, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_a_pulled_prefix_is_imported_under_its_last_hash_and_cached() -> None:
    source, importer = _Source(), _Importer()
    async with _served(source) as address:
        bench = _Bench(address, importer, num_here=3)
        assert await bench.fetch() == (10 - 3) * _BLOCK
        await bench.pulls.close()

    chain = keyed_chains(b"key", _BLOCK)("", "native")
    chain.extend(_TOKENS)
    assert source.asked[0].block_hashes == b"".join(chain.hashes) and source.asked[0].importer == str(_ME)
    assert importer.expected == [ExpectedPrompt(40, chain.hashes[9], 0)]
    assert bench.posted[-1] == AdmitPull(1, chain.parent_of(0), tuple(chain.hashes))
    assert bench.outcome("ok") == 1


def _refuse() -> None:
    raise HandOffFailed(HandOffReason.DIGEST_MISMATCH, "block 3")


@pytest.mark.parametrize(
    ("importer", "outcome"),
    [(_Importer(then=_refuse), "digest_mismatch"), (_Importer(hangs=True), "late")],
    ids=["a digest differs", "it takes longer than computing"],
)
async def test_after_a_failed_pull_the_source_is_avoided_for_ten_seconds(importer: _Importer, outcome: str) -> None:
    source = _Source()
    async with _served(source) as address:
        bench = _Bench(address, importer)
        if importer.hangs:  # computing is quick: the shortest timeout
            bench.token_s = 1e-9
        assert await bench.fetch() == 0
        assert isinstance(bench.posted[-1], Discard)
        assert bench.outcome(outcome) == 1

        assert await bench.fetch() == 0
        assert len(source.asked) == 1
        bench.clock.advance(60.0)
        await bench.fetch()
        assert len(source.asked) == 2
        await bench.pulls.close()


async def test_a_refused_pull_counts_the_refusals_reason() -> None:
    source = _Source()
    source.refusal = Overloaded("this worker looks up 64 prefixes for other workers, the most it allows at once")
    async with _served(source) as address:
        bench = _Bench(address, _Importer())
        assert await bench.fetch() == 0
        assert (bench.outcome("overloaded"), bench.outcome("unreachable")) == (1, 0)
        await bench.pulls.close()


async def test_a_source_without_enough_blocks_costs_one_call() -> None:
    gone = _Bench("127.0.0.1:1", _Importer())
    assert await gone.fetch() == 0
    assert gone.outcome("unreachable") == 1
    await gone.pulls.close()

    source = _Source()
    source.num_blocks = 0
    async with _served(source) as address:
        empty = _Bench(address, _Importer())
        assert await empty.fetch() == 0
        assert empty.outcome("gone") == 1
        await empty.pulls.close()


async def test_a_worker_without_free_blocks_or_with_itself_as_source_does_not_pull() -> None:
    source = _Source()
    async with _served(source) as address:
        full = _Bench(address, _Importer(), has_room=False)
        assert await full.fetch() == 0
        assert full.outcome("not_enough_blocks") == 1
        assert await full.fetch(source=_ME) == 0
        assert len(source.asked) == 1
        await full.pulls.close()


@pytest.mark.parametrize(("ticket", "num_blocks"), [(b"ticket", 0), (b"", 3), (b"ticket", 11), (b"ticket", 1 << 31)])
async def test_an_inconsistent_prefix_offer_is_refused_and_the_prompt_is_computed(
    ticket: bytes, num_blocks: int
) -> None:
    """A ticket for no blocks used to raise IndexError out of `fetch`, which ended the request's prefill."""
    source, importer = _Source(), _Importer()
    source.response = kv_pb2.LeasePrefixResponse(ticket=ticket, num_blocks=num_blocks)
    async with _served(source) as address:
        bench = _Bench(address, importer)
        assert await bench.fetch() == 0
        assert bench.outcome("malformed_message") == 1
        assert importer.expected == [] and not any(isinstance(c, ReservePull) for c in bench.posted)
        await bench.pulls.close()
