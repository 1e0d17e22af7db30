"""A ticket for a cached prefix is complete at once, and a cancelled request leaves no lease."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cluster.errors import MalformedMessage, Overloaded
from cluster.protocol.hashing import BlockChain
from engine.scheduling.cache_commands import LeasePrefix, PrefixLeased
from engine.steps.questions import Questions
from kvtransfer.exporter.exporter import IssuedTicket
from kvtransfer.exporter.service import PrefixLeases
from tandem.internal.v1 import kv_pb2

_CHAIN = BlockChain(b"key", 16, root=b"")
_CHAIN.extend(range(64))
_HASHES = tuple(_CHAIN.hashes)


@dataclass
class _Exporter:
    """An exporter that records its calls."""

    told: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def issue(self, **ticket: object) -> IssuedTicket:
        self.told.append(("issue", ticket))
        assert isinstance(ticket["ticket_id"], bytes)
        return IssuedTicket(ticket["ticket_id"], b"signed")

    def seal(self, ticket_id: bytes, **blocks: object) -> None:
        self.told.append(("seal", blocks))

    def finish(self, ticket_id: bytes, **end: object) -> None:
        self.told.append(("finish", end))

    def expect_soon(self, ticket_id: bytes) -> None:
        self.told.append(("expect_soon", {"ticket_id": ticket_id}))


class _Bench:
    def __init__(self) -> None:
        self.exporter = _Exporter()
        self.asked: asyncio.Queue[LeasePrefix] = asyncio.Queue()
        self.released: list[bytes] = []
        self.questions = Questions(self.asked.put_nowait)
        self.leases = PrefixLeases(
            exporter=self.exporter,  # type: ignore[arg-type]  # a stand-in with the methods that are used
            block_size=16,
            lease=self._lease,
            release=self.released.append,
        )

    async def _lease(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> PrefixLeased:
        return await self.questions.ask(LeasePrefix(ticket_id, block_hashes, min_blocks))

    async def answer(self, *block_ids: int, unverified: frozenset[int] = frozenset()) -> bytes:
        """Lease these blocks, as the step thread does, and return the ticket id."""
        ticket_id = (await self.asked.get()).ticket_id
        self.questions.settle((PrefixLeased(ticket_id, block_ids, unverified),))
        return ticket_id

    def request(self, hashes: bytes = b"".join(_HASHES)) -> kv_pb2.LeasePrefixRequest:
        return kv_pb2.LeasePrefixRequest(request_id="r", attempt=1, importer="me@1", block_hashes=hashes, min_blocks=2)


async def test_the_ticket_covers_exactly_the_cached_blocks_and_is_finished() -> None:
    bench = _Bench()
    asking = asyncio.create_task(bench.leases.lease(bench.request()))
    await bench.answer(7, 3, 9, unverified=frozenset({3}))

    leased = await asking

    assert (leased.ticket, leased.num_blocks) == (b"signed", 3)
    (issue, ticket), (seal, blocks), (finish, end), (expect_soon, expected) = bench.exporter.told
    assert (issue, seal, finish, expect_soon) == ("issue", "seal", "finish", "expect_soon")
    assert (ticket["num_tokens"], ticket["prompt_hash"], ticket["num_choices"]) == (48, _HASHES[2], 0)
    assert str(ticket["importer"]) == "me@1"
    assert blocks == {"first_index": 0, "block_ids": (7, 3, 9), "unverified": {3}}
    assert end == {"first_tokens": (), "tail": None}
    assert expected == {"ticket_id": ticket["ticket_id"]}, "leased for no longer than an asker that lives needs"
    assert bench.released == []


async def test_fewer_blocks_than_requested_give_no_ticket() -> None:
    bench = _Bench()
    asking = asyncio.create_task(bench.leases.lease(bench.request()))
    await bench.answer()

    assert (await asking).ticket == b"" and bench.exporter.told == []


@pytest.mark.parametrize("is_answered_first", [True, False])
async def test_blocks_leased_for_a_cancelled_offer_are_released(is_answered_first: bool) -> None:
    bench = _Bench()
    asking = asyncio.create_task(bench.leases.lease(bench.request()))
    await asyncio.sleep(0)  # the question is posted
    if is_answered_first:
        ticket_id = await bench.answer(7, 3)
        asking.cancel()
    else:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        ticket_id = await bench.answer(7, 3)
    await asyncio.gather(asking, return_exceptions=True)

    assert bench.released == [ticket_id] and bench.exporter.told == []


@pytest.mark.parametrize("hashes", [b"", b"x" * 17])
async def test_a_malformed_list_of_hashes_is_refused(hashes: bytes) -> None:
    bench = _Bench()
    with pytest.raises(MalformedMessage, match="multiple of 16"):
        await bench.leases.lease(bench.request(hashes))


async def test_the_number_of_look_ups_at_once_is_bounded() -> None:
    bench = _Bench()
    asking = [asyncio.create_task(bench.leases.lease(bench.request())) for _ in range(64)]
    for _ in asking:
        await bench.asked.get()
    with pytest.raises(Overloaded):
        await bench.leases.lease(bench.request())

    asking.pop().cancel()
    await asyncio.sleep(0)
    asking.append(asyncio.create_task(bench.leases.lease(bench.request())))
    await bench.asked.get()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert list(bench.leases.owners()) == []
