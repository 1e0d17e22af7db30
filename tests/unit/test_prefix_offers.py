"""A ticket for what the prefix cache holds: whole at once, and never leased for nobody."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cluster.errors import MalformedMessage
from cluster.protocol.hashing import hash_blocks
from kvtransfer.exporter.exporter import IssuedTicket
from kvtransfer.exporter.prefix_offers import PrefixOffers
from tandem.v1 import kv_pb2

_HASHES = tuple(hash_blocks(b"key", range(64), 16))


@dataclass
class _Exporter:
    """Writes down what it is told."""

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
        self.asked: asyncio.Queue[bytes] = asyncio.Queue()
        self.released: list[bytes] = []
        self.offers = PrefixOffers(
            exporter=self.exporter,  # type: ignore[arg-type]  # a stand-in with the methods that are used
            block_size=16,
            ask=lambda ticket_id, block_hashes, min_blocks: self.asked.put_nowait(ticket_id),
            release=self.released.append,
        )

    def request(self, hashes: bytes = b"".join(_HASHES)) -> kv_pb2.OfferPrefixRequest:
        return kv_pb2.OfferPrefixRequest(request_id="r", attempt=1, importer="me@1", block_hashes=hashes, min_blocks=2)


async def test_the_ticket_covers_exactly_what_is_here_and_is_finished() -> None:
    bench = _Bench()
    offering = asyncio.create_task(bench.offers.offer(bench.request()))
    bench.offers.on_offered(await bench.asked.get(), (7, 3, 9), frozenset({3}))

    offer = await offering

    assert (offer.ticket, offer.num_blocks) == (b"signed", 3)
    (issue, ticket), (seal, blocks), (finish, end), (expect_soon, expected) = bench.exporter.told
    assert (issue, seal, finish, expect_soon) == ("issue", "seal", "finish", "expect_soon")
    assert (ticket["num_tokens"], ticket["prompt_hash"], ticket["num_choices"]) == (48, _HASHES[2], 0)
    assert str(ticket["importer"]) == "me@1"
    assert blocks == {"first_index": 0, "block_ids": (7, 3, 9), "unverified": {3}}
    assert end == {"first_tokens": (), "tail": None}
    assert expected == {"ticket_id": ticket["ticket_id"]}, "leased for no longer than an asker that lives needs"
    assert bench.released == []


async def test_too_little_is_no_ticket() -> None:
    bench = _Bench()
    offering = asyncio.create_task(bench.offers.offer(bench.request()))
    bench.offers.on_offered(await bench.asked.get(), ())

    assert (await offering).ticket == b"" and bench.exporter.told == []


@pytest.mark.parametrize("is_answered_first", [True, False])
async def test_blocks_that_were_leased_for_somebody_who_went_away_are_released(is_answered_first: bool) -> None:
    bench = _Bench()
    offering = asyncio.create_task(bench.offers.offer(bench.request()))
    ticket_id = await bench.asked.get()
    if is_answered_first:
        bench.offers.on_offered(ticket_id, (7, 3))
        offering.cancel()
    else:
        offering.cancel()
        await asyncio.gather(offering, return_exceptions=True)
        bench.offers.on_offered(ticket_id, (7, 3))
    await asyncio.gather(offering, return_exceptions=True)

    assert bench.released == [ticket_id] and bench.exporter.told == []


@pytest.mark.parametrize("hashes", [b"", b"x" * 17])
async def test_what_is_no_chain_of_hashes_is_refused(hashes: bytes) -> None:
    bench = _Bench()
    with pytest.raises(MalformedMessage, match="multiple of 16"):
        await bench.offers.offer(bench.request(hashes))
